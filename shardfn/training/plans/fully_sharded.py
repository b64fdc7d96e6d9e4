"""fsdp: fully sharded placements, alone or on the axes that other placements leave free."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from typing import Any

import attrs

from ... import _compat, tree_pairs
from ...byte_sizes import bytes_of
from ...errors import PlacementError, ShardError, TreeError
from ...mesh import axes_of, check_mesh
from ...placement import P, Stage, blocks_of, is_spec, marks_of, row_of, stages_of
from ...placement_table import Leaf, Placements
from ...types import REDUCTIONS, MeshAxes
from .leaves import Params, checked_axes, params_of

NO_STAGES: Mapping[str, int | Stage] = types.MappingProxyType({})


@attrs.frozen
class Dims:
    """Where a parameter is.

    Args:
        axes: for each dim the mesh axes that shard it, the first with a number of blocks ("tp*3").
        stages: by mesh axis, the stage of a pipeline that has it.
    """

    axes: tuple[tuple[str, ...], ...]
    stages: Mapping[str, int | Stage] = NO_STAGES


@_compat.outside_only
def fsdp(
    params: Any,
    mesh: Any,
    *,
    axis: str | tuple[str, ...] | None = None,
    min_bytes: int | str = 0,
    base: Any = None,
) -> Placements:
    """Shard every parameter over a mesh axis, on its largest dim that can be split into equal
    shards.

    If no dim of a parameter can be split into equal shards, its largest dim is sharded in uneven
    chunks. `fsdp` never shards a dim that `base` shards. If `base` shards all dims of a parameter,
    the parameter keeps its placement.

    Args:
        params: a dict of tensors, DTensors or `ShapeDtype`s, or a tree of dicts.
        mesh: a DeviceMesh.
        axis: the mesh axis, or axes, over which `fsdp` shards; by default, all axes that `base`
            does not use.
        min_bytes: the size of the global tensor below which a parameter keeps the placement of
            `base`, as a number of bytes or as text such as "100KB".
        base: placements that `fsdp` keeps, such as those of a tensor parallel plan: a prefix tree
            over the parameters, in which None means replicated.

    Returns:
        A dict with a `P` for each parameter, for `in_placements`, `distribute` and `init`. The dict
        of placements prints as a table.

    Raises:
        PlacementError: the mesh lacks the axis, `base` uses all axes, or `base` does not fit the
            parameters.
        TreeError: base does not match the parameters.
        ShardError: min_bytes is not a number of bytes.

    Source: torch.distributed.fsdp.fully_shard; MaxText's and EasyLM's fsdp axes.

    Example:
        >>> import torch, shardfn as sf
        >>> shape = sf.ShapeDtype((6, 8))
        >>> with sf.fake_world(4):
        ...     mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        ...     where = sf.placements({"w": shape}, {"w": P(None, "tp")})
        ...     print(sf.fsdp({"w": shape}, mesh, base=where))
        path  tensors  shape  dtype    placement        bytes a rank
        w     1        6x8    float32  P('dp', 'tp')    48 B
        1 tensors on (dp=2, tp=2): 192 B, 48 B a rank
    """
    check_mesh("fsdp", mesh)
    mesh_axes = axes_of(mesh)
    tree = params_of("fsdp", params)
    smallest = smallest_of("fsdp", min_bytes)
    before = base_of("fsdp", base, params, tree, mesh_axes)
    names = _axes(axis, mesh_axes, before)
    return placed(tree, before, names, smallest, mesh_axes)


def placed(
    tree: Params, before: dict[str, Dims], names: tuple[str, ...], smallest: int, axes: MeshAxes
) -> Placements:
    """Placements with these mesh axes on a free dim of each parameter that is large enough.

    Args:
        tree: the parameters.
        before: the mesh axes of each dim, by path.
        names: the mesh axes to add.
        smallest: bytes; smaller parameters stay as they are.
        axes: of the mesh.
    """
    specs = {}
    for leaf in tree.tensors:
        dims = before[leaf.path]
        if leaf.nbytes >= smallest:
            dims = sharded(dims, leaf.shape, names, axes)
        specs[leaf.path] = spec_of(dims)
    return Placements(tree.filled(specs), tree.tensors, axes)


def sharded(dims: Dims, shape: tuple[int, ...], names: tuple[str, ...], axes: MeshAxes) -> Dims:
    """The axes of each dim, with these axes on the largest free dim that they divide."""
    used = axes_in(dims)
    added = tuple(name for name in names if name not in used)
    free = [i for i, dim in enumerate(dims.axes) if not dim and shape[i] > 1]
    if not added or not free:
        return dims
    ranks = math.prod(axes.sizes[axes.names.index(name)] for name in added)
    best = max(free, key=lambda i: (shape[i] % ranks == 0, shape[i], -i))
    rows = tuple(added if i == best else dim for i, dim in enumerate(dims.axes))
    return Dims(rows, dims.stages)


def axes_in(dims: Dims) -> list[str]:
    """The mesh axes that shard any dim, or have stages."""
    return [blocks_of(part)[0] for dim in dims.axes for part in dim] + [*dims.stages]


def spec_of(dims: Dims) -> P:
    """The axes of each dim, and the stages, as a placement."""
    count = max((i + 1 for i, dim in enumerate(dims.axes) if dim), default=0)
    parts = [dim[0] if len(dim) == 1 else dim or None for dim in dims.axes[:count]]
    return P(*parts, **dims.stages)


def smallest_of(where: str, size: int | str) -> int:
    """A number of bytes, which may be 0.

    Raises:
        ShardError: it is not a number of bytes.
    """
    if size == 0 and not isinstance(size, bool):
        return 0
    try:
        return bytes_of(size)
    except ValueError as error:
        fix = "give a number of bytes, or text such as '100KB'"
        raise ShardError.of(f"{where}, min_bytes", str(error), fix=fix) from None


def _axes(axis: Any, axes: MeshAxes, before: dict[str, Dims]) -> tuple[str, ...]:
    """The mesh axes to shard over.

    Raises:
        PlacementError: the mesh lacks one, or none is free.
    """
    if axis is not None:
        return checked_axes("fsdp", axes, axis)
    used = {name for dims in before.values() for name in axes_in(dims)}
    free = tuple(name for name in axes.names if name not in used)
    if not free:
        raise PlacementError.of(
            "fsdp, axis",
            f"the placements in base shard over every axis of the mesh {axes}",
            fix=" or ".join(f"axis={name!r}" for name in axes.names),
            arg_path="axis",
        )
    return free


def base_of(where: str, base: Any, params: Any, tree: Params, axes: MeshAxes) -> dict[str, Dims]:
    """The mesh axes over which `base` shards each dim of each parameter, by path.

    Raises:
        TreeError: it does not match the parameters.
        PlacementError: placements that do not fit, all listed.
    """
    try:
        specs = tree_pairs.broadcast_prefix(base, dict(params), is_spec)
    except ValueError as error:
        raise TreeError.of(
            f"{where}, base",
            "base does not match the parameters",
            *error.args,
            fix="a prefix tree of placements, such as sf.placements returns",
            arg_path="base",
        ) from None
    found: dict[str, Dims] = {}
    wrong = []
    for leaf, spec in zip(tree.leaves, specs, strict=True):
        try:
            if leaf is not None:
                found[leaf.path] = _dims(leaf, spec, axes)
        except ValueError as error:
            wrong.append(f"{leaf.path if leaf else ''}: {error}")
    if wrong:
        raise PlacementError.of(
            f"{where}, base", *wrong, fix="give placements that fit each parameter"
        )
    return found


def _dims(leaf: Leaf, spec: Any, axes: MeshAxes) -> Dims:
    """The mesh axes over which a placement shards each dim, and its stages."""
    marks = ("R",) * len(axes.names) if spec is None else marks_of(spec, leaf.shape, axes)
    if set(marks) & {*REDUCTIONS}:
        raise ValueError(f"{spec} is Partial, but a parameter is a global value")
    rows = tuple(row_of(dim, marks, axes) for dim in range(len(leaf.shape)))
    return Dims(rows, stages_of(marks, axes))
