"""The mesh axes that a process group, a mesh or a list of ranks stands for, while a function is
traced.

Dynamo runs these functions on constants, so errors reach the user unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ... import _compat
from ...errors import CaptureError
from ...mesh import (
    EVERY,
    axes_of,
    current_mesh,
    mesh_of_world,
    meshes_here,
    ranks_of,
    real_mesh,
)
from ..shard_map.axis_names import current_scope
from .checks import needs_ranks
from .flattened import spread, stands_for

KINDS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


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
    if (
        isinstance(group, tuple)
        and group
        and isinstance(real_mesh(group[0]), DeviceMesh)
    ):
        return axes_of_mesh(what, group[0], group[1])
    if isinstance(group, DeviceMesh):
        return axes_of_mesh(what, group, None)
    mesh = _mesh(what, group)
    found = _axes_with(mesh, group)
    if found is None:
        got = f"its group is {_said(group)}, that of no axis of {axes_of(mesh)}"
        fix = "mesh.get_group(axis), or a mesh that has the group as an axis"
        raise CaptureError.of(what, got, needed="a mesh axis", fix=fix)
    return _manual(what, found, mesh)


@_compat.constant_in_graph
def axes_of_mesh(what: str, mesh: Any, dim: Any) -> tuple[str, ...]:
    """The manual axes of a mesh, or of one dim of it.

    Raises:
        NeedsRanks: outside of the code of one rank.
    """
    mesh = real_mesh(mesh)
    names = axes_of(mesh).names
    if dim is not None:
        names = (dim,) if isinstance(dim, str) else (names[dim],)
    return _manual(what, names, mesh)


def _manual(what: str, names: tuple[str, ...], mesh: Any) -> tuple[str, ...]:
    here = current_scope()
    if here.manual:
        names = spread(names, here.mesh)
    if any(name not in here.manual for name in names):
        raise needs_ranks(what, mesh)
    return names


def _mesh(what: str, group: Any) -> Any:
    """The mesh of the code here: that of the shard_map, or one that has the group."""
    here = current_scope()
    is_auto = here.mesh is not None and axes_of(here.mesh).names == (EVERY,)
    if here.manual and not is_auto:
        return here.mesh
    wanted = here.mesh if is_auto else current_mesh()
    if not _is_every(group):
        fitting = [m for m in meshes_here() if _axes_with(m, group) is not None]
        wanted = wanted if wanted in fitting else _only(what, group, fitting)
    if here.manual and wanted is here.mesh:
        return wanted
    raise needs_ranks(
        what, wanted if wanted is not None else mesh_of_world(here.device)
    )


def _only(what: str, group: Any, fitting: list[Any]) -> Any:
    """The one mesh among those that have a group.

    Raises:
        CaptureError: there is none, or several.
    """
    if len(fitting) == 1:
        return fitting[0]
    got = f"its group {_said(group)} is an axis of {len(fitting)} meshes"
    fix = "call it inside `with use_mesh(mesh)`, of a mesh that has the group as an axis"
    raise CaptureError.of(what, got, needed="one mesh", fix=fix)


def _is_every(group: Any) -> bool:
    return group is None or group is dist.group.WORLD


def _axes_with(mesh: Any, group: Any) -> tuple[str, ...] | None:
    """The axes of a mesh over which a group communicates, if it has such."""
    fitting = (axes for axes in _groups(mesh) if _fits(mesh, axes, group))
    return next(fitting, None) or stands_for(group, mesh)


def _groups(mesh: Any) -> list[tuple[str, ...]]:
    """The axes that a group may stand for: all of them, or one."""
    names = axes_of(mesh).names
    return [names, *((name,) for name in names)]


def _fits(mesh: Any, axes: tuple[str, ...], group: Any) -> bool:
    is_all = len(axes) == mesh.ndim
    if _is_every(group):
        return is_all and mesh.size() == dist.get_world_size()
    if isinstance(group, Sequence) and not isinstance(group, str):
        return is_all and list(group) == ranks_of(mesh)
    name = group if isinstance(group, str) else group.group_name
    return len(axes) == 1 and mesh.get_group(axes[0]).group_name == name


def _said(group: Any) -> str:
    return repr(getattr(group, "group_name", group))


@_compat.constant_in_graph
def reduction(what: str, op: Any) -> str:
    """A reduction as one of ours.

    Raises:
        CaptureError: it has none here.
    """
    for kind, known in KINDS.items():
        if op in (kind, known):
            return kind
    raise CaptureError.of(
        what, f"op is {op!r}", needed=f"one of {', '.join(KINDS)}"
    )


@_compat.constant_in_graph
def scattered_reduction(what: str, op: Any) -> str:
    """A reduction that can be scattered.

    Raises:
        CaptureError: it is neither a sum nor a mean.
    """
    kind = reduction(what, op)
    if kind not in ("sum", "avg"):
        fix = "all_reduce, and each rank's part of it"
        raise CaptureError.of(what, f"op is {kind}", needed="sum or avg", fix=fix)
    return kind


@_compat.constant_in_graph
def check_splits(what: str, *sizes: Any) -> None:
    """Check that all ranks exchange equal parts.

    Raises:
        CaptureError: the sizes differ.
    """
    for row in sizes:
        if row is not None and len(set(row)) > 1:
            got = f"split sizes {list(row)}"
            fix = "parts of equal size, padded"
            raise CaptureError.of(what, got, needed="equal parts", fix=fix)


@_compat.constant_in_graph
def source_of(what: str, group: Any, src: Any, group_src: Any) -> int:
    """The number in its group of the rank that sends.

    Raises:
        CaptureError: it is not in the group of this rank.
    """
    if group_src is not None:
        return group_src
    axes = axes_of_group(what, group)
    mesh = current_scope().mesh
    if len(axes) == mesh.ndim and src in ranks_of(mesh):
        return ranks_of(mesh).index(src)
    got = f"src is {src}, a rank of the world, in a group over {', '.join(axes)}"
    raise CaptureError.of(
        what, got, needed="a rank of the group", fix="group_src=..."
    )
