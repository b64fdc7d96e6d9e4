"""The mesh axes that a process group, a mesh or a list of ranks stands for, while a function is
traced.

Dynamo runs these functions on constants, so errors reach the user unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ... import _compat
from ...errors import CaptureError, PlacementError
from ...mesh import (
    WORLD_AXIS,
    axes_of,
    current_mesh,
    mesh_of_world,
    meshes_here,
    ranks_of,
    real_mesh,
)
from ..shard_map.axis_names import current_scope
from .flattened_meshes import axes_of_flattened_group, unflattened_axes
from .placement_checks import needs_ranks

KINDS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
BITS = "band", "bor", "bxor"
ORDERED = "max", "min"
SCALED = "op=dist.ReduceOp.SUM; in place of PREMUL_SUM reduce x * factor"


@_compat.constant_in_graph
def axes_of_group(what: str, group: Any) -> tuple[str, ...]:
    """The manual axes over which a group communicates.

    Args:
        what: the call.
        group: a process group, its name, a mesh, (mesh, dim), ranks, or None for all ranks.

    Raises:
        NeedsRanks: outside of the code of one rank.
        CaptureError: the mesh has no axis with this group.
    """
    group = real_mesh(group)
    if isinstance(group, tuple) and group and isinstance(real_mesh(group[0]), DeviceMesh):
        return axes_of_mesh(what, group[0], group[1])
    if isinstance(group, DeviceMesh):
        return axes_of_mesh(what, group, None)
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        fix = "mesh.get_group(axis) of a mesh that contains this rank"
        raise CaptureError.of(what, "this rank is not in the group", fix=fix)
    mesh = _mesh(what, group)
    axes = axes_with(mesh, group)
    if axes is None:
        fix = "mesh.get_group(axis), or use a mesh with the group as one axis"
        raise CaptureError.of(
            what,
            f"the group is {_group_text(group)}, which is not an axis of {axes_of(mesh)}",
            needed="a mesh axis",
            fix=fix,
        )
    return _manual_axes(what, axes, mesh)


@_compat.constant_in_graph
def axes_of_mesh(what: str, mesh: Any, dim: Any) -> tuple[str, ...]:
    """The manual axes of a mesh, or of one dim of it.

    Raises:
        NeedsRanks: outside of the code of one rank.
        PlacementError: the mesh has no such dim.
    """
    mesh = real_mesh(mesh)
    names = axes_of(mesh).names
    if dim is not None:
        names = (_name_of(what, dim, names),)
    return _manual_axes(what, names, mesh)


@_compat.constant_in_graph
def size_of_mesh(mesh: Any, dim: Any) -> int:
    """The number of ranks of a mesh, or of one dim of it.

    Raises:
        PlacementError: the mesh has no such dim.
    """
    mesh = real_mesh(mesh)
    if dim is None:
        return mesh.size()
    if isinstance(dim, int) and -mesh.ndim <= dim < mesh.ndim:
        return mesh.size(dim)
    names = axes_of(mesh).names
    number = names.index(dim) if dim in names else 0
    raise PlacementError.of(
        "mesh.size, mesh_dim",
        f"got {dim!r}, of a mesh with axes {names}",
        needed=f"the number of a mesh axis, below {mesh.ndim}",
        fix=f"mesh.size({number})",
    )


def _name_of(what: str, dim: Any, names: tuple[str, ...]) -> str:
    """The name of the mesh axis that a name or a number stands for."""
    if dim in names:
        return dim
    if isinstance(dim, int) and -len(names) <= dim < len(names):
        return names[dim]
    raise PlacementError.of(
        f"{what}, mesh_dim",
        f"got {dim!r}, of a mesh with axes {names}",
        needed="a mesh axis, by name or by number",
        fix=f"{what}({names[0]!r})",
    )


def _manual_axes(what: str, names: tuple[str, ...], mesh: Any) -> tuple[str, ...]:
    here = current_scope()
    if here.manual:
        names = unflattened_axes(names, here.mesh)
    if any(name not in here.manual for name in names):
        raise needs_ranks(what, mesh)
    return names


def _mesh(what: str, group: Any) -> Any:
    """The mesh of the code here: that of the shard_map, or one that has the group."""
    here = current_scope()
    is_auto = here.mesh is not None and axes_of(here.mesh).names == (WORLD_AXIS,)
    if here.manual and not is_auto:
        return here.mesh
    wanted = here.mesh if is_auto else current_mesh()
    if not is_world_group(group):
        fitting = [m for m in meshes_here() if axes_with(m, group) is not None]
        wanted = wanted if wanted in fitting else _only_mesh_with(what, group, fitting)
    if here.manual and wanted is here.mesh:
        return wanted
    raise needs_ranks(what, wanted if wanted is not None else mesh_of_world(here.device))


def _only_mesh_with(what: str, group: Any, fitting: list[Any]) -> Any:
    """The one mesh among those that have a group.

    Raises:
        CaptureError: there is none, or several.
    """
    if len(fitting) == 1:
        return fitting[0]
    raise CaptureError.of(
        what,
        f"the group {_group_text(group)} is an axis of {len(fitting)} meshes",
        needed="one mesh",
        fix="make the call inside `with use_mesh(mesh)`, with the mesh that you mean",
    )


def is_world_group(group: Any) -> bool:
    """Whether a group, or the group of a name, is that of all ranks."""
    world = dist.group.WORLD
    if group is None or group is world:
        return True
    return world is not None and group == world.group_name


def axes_with(mesh: Any, group: Any) -> tuple[str, ...] | None:
    """The axes of a mesh over which a group communicates, if it has such."""
    fitting = (axes for axes in _groups(mesh) if _has_group(mesh, axes, group))
    return next(fitting, None) or axes_of_flattened_group(group, mesh)


def _groups(mesh: Any) -> list[tuple[str, ...]]:
    """The sets of mesh axes that a process group may stand for: all of them, or one."""
    names = axes_of(mesh).names
    return [names, *((name,) for name in names)]


def _has_group(mesh: Any, axes: tuple[str, ...], group: Any) -> bool:
    is_all = len(axes) == mesh.ndim
    if is_world_group(group):
        return is_all and mesh.size() == dist.get_world_size()
    if isinstance(group, Sequence) and not isinstance(group, str):
        return is_all and list(group) == ranks_of(mesh)
    name = group if isinstance(group, str) else group.group_name
    return len(axes) == 1 and mesh.get_group(axes[0]).group_name == name


def _group_text(group: Any) -> str:
    return repr(getattr(group, "group_name", group))


@_compat.constant_in_graph
def reduction(what: str, op: Any, dtype: torch.dtype) -> str:
    """The name of a reduction of torch.distributed, as shardfn calls it.

    Raises:
        CaptureError: it has none here, or none for the dtype.
    """
    op = op.lower() if isinstance(op, str) else op
    kind = next((k for k, known in KINDS.items() if op in (k, known)), None)
    if kind is None:
        raise CaptureError.of(
            what, f"op is {op!r}", needed=f"one of {', '.join(KINDS)}", fix=SCALED
        )
    is_float = dtype.is_floating_point or dtype.is_complex
    got = f"op is {kind}, of {dtype}"
    if kind in BITS and is_float:
        fix = "x.view(dtype) with an integer dtype, or another reduction"
        raise CaptureError.of(what, got, needed="integers or bool", fix=fix)
    if kind in ORDERED and dtype.is_complex:
        fix = f"op={kind} of torch.view_as_real(x), or of x.abs()"
        raise CaptureError.of(what, got, needed="real numbers", fix=fix)
    if kind == "avg" and not is_float:
        fix = "op=dist.ReduceOp.SUM, and divide by dist.get_world_size(group)"
        raise CaptureError.of(what, got, needed="floating numbers", fix=fix)
    return kind


@_compat.constant_in_graph
def check_list_tensors(what: str, argument: str, parts: Sequence[Any], like: Any, n: int) -> None:
    """Check the tensors of a list: one for each rank of a group, all of one shape and dtype.

    Args:
        what: the call.
        argument: the list.
        parts: (shape, dtype) of each tensor.
        like: (shape, dtype) that they must have; None for that of the first.
        n: the number of ranks.

    Raises:
        CaptureError: lists every mismatch.
    """
    check_length(what, argument, len(parts), n)
    like = parts[0] if like is None else like
    wrong = [
        f"{argument}[{k}] has shape {shape}, {dtype}"
        for k, (shape, dtype) in enumerate(parts)
        if (shape, dtype) != tuple(like)
    ]
    if wrong:
        raise CaptureError.of(
            what,
            *wrong,
            needed=f"shape {like[0]}, {like[1]}, since all ranks share one program",
            fix="pad the tensors to equal size",
        )


@_compat.constant_in_graph
def check_length(what: str, argument: str, got: int, needed: int) -> None:
    """Check the length of a list.

    Raises:
        CaptureError: another length.
    """
    if got != needed:
        raise CaptureError.of(
            what,
            f"{argument} has {got} elements",
            needed=f"{needed}",
            fix="pass one element for each rank of the group, or for each tensor",
        )


@_compat.constant_in_graph
def refuse_of_one(what: str, argument: str, fix: str) -> None:
    """Refuse a collective that takes a list on one rank alone.

    Raises:
        CaptureError: always.
    """
    raise CaptureError.of(
        what,
        f"torch accepts {argument} on one rank only, but all ranks share one program",
        needed="the same call on all ranks",
        fix=fix,
    )


@_compat.constant_in_graph
def check_splits(what: str, *sizes: Any) -> None:
    """Check that all ranks exchange equal parts.

    Raises:
        CaptureError: the sizes differ.
    """
    for row in sizes:
        if row is not None and len(set(row)) > 1:
            raise CaptureError.of(
                what,
                f"split sizes {list(row)}",
                needed="equal parts",
                fix="pad the parts to equal size",
            )


@_compat.constant_in_graph
def number_of_root(what: str, group: Any, src: Any, group_src: Any, name: str = "src") -> int:
    """The number, in its group, of the root rank that sends or receives.

    Args:
        what: the call.
        group: the group.
        src: a rank of the world, or None.
        group_src: a number in the group, or None.
        name: of `src` in the call.

    Raises:
        CaptureError: it is not in the group of this rank.
    """
    axes = axes_of_group(what, group)
    mesh = current_scope().mesh
    sizes = dict(zip(axes_of(mesh).names, axes_of(mesh).sizes, strict=True))
    n = math.prod([sizes[axis] for axis in axes])
    if src is None and group_src is None:
        got = f"neither {name} nor group_{name} is given, so the rank is unknown"
        raise CaptureError.of(what, got, fix=f"group_{name}=0")
    if group_src is not None:
        if src is None and 0 <= group_src < n:
            return group_src
        got = f"group_{name} is {group_src}, and {name} is {src}"
        raise CaptureError.of(
            what,
            got,
            needed=f"either {name} or group_{name}, a number from 0 to {n - 1}",
            fix=f"group_{name}=0",
        )
    if len(axes) == mesh.ndim and src in ranks_of(mesh):
        return ranks_of(mesh).index(src)
    over = ", ".join(axes)
    got = f"{name} is {src}, a global rank, which is not in each group over {over}"
    raise CaptureError.of(
        what,
        got,
        needed="a rank of the group",
        fix=f"group_{name}={_number_in_group(mesh, axes, src)}",
    )


def _number_in_group(mesh: Any, axes: Sequence[str], src: Any) -> int:
    """The number that a rank has in its own group over some axes; 0 for one that is not here."""
    here = ranks_of(mesh)
    place = here.index(src) if src in here else 0
    known = axes_of(mesh)
    rows = list(zip(known.names, known.sizes, strict=True))
    at = {}
    for name, size in reversed(rows):
        at[name] = place % size
        place //= size
    number = 0
    for name, size in rows:
        number = number * size + at[name] if name in axes else number
    return number
