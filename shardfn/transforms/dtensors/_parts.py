"""DTensors on a part of the mesh, as `mesh["tp"]`, among the arguments and results of the code of
one rank: each rank's own tensors, which make a DTensor on the axes of the part alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _compat
from ...capture.dtensors import checks
from ...capture.dtensors.values import placement_of
from ...errors import PlacementError
from ...mesh import axes_of
from ...ops import shard_map as prims
from ...ops.text_formats import parse_part, parse_placed, print_part, print_shards
from ...partition.layout import dense_strides
from ...simulated import SimulatedTensor, dtensors, of_one_part, shown
from .._paired import numbers
from ._calls import joined, to_local

ARGUMENT = "a DTensor on a part of the mesh"


def is_on_part(x: Any, mesh: Any) -> bool:
    """Whether a tensor is a DTensor on a part of a mesh."""
    if not isinstance(x, DTensor) or x.device_mesh == mesh:
        return False
    names = {*axes_of(x.device_mesh).names}
    is_slice = names < {*axes_of(mesh).names}
    return is_slice and _compat.root_mesh(x.device_mesh) == mesh


def own_of_part(name: str, path: str, x: DTensor, mesh: Any) -> torch.Tensor:
    """Each rank's own tensor of a DTensor on a part of a mesh. In a simulated world, which has
    those of one part, all parts have the same.

    Raises:
        PlacementError: its shards have different sizes.
    """
    _refuse_uneven(name, path, x)
    local: Any = _compat.local_tensor(x)
    if not isinstance(local, SimulatedTensor):
        return local
    here = _ranks(x.device_mesh)
    of_rank = dict(
        zip(here, local.shards, strict=True)
    )
    names = axes_of(x.device_mesh).names
    peers = [
        _peer(mesh, names, rank, here)
        for rank in _ranks(mesh)
    ]
    every = [of_rank[rank] for rank in peers]
    return SimulatedTensor(every, shown(mesh))


def _refuse_uneven(name: str, path: str, x: DTensor) -> None:
    """Refuse shards of different sizes, whose sizes other ranks cannot know."""
    left = list(x.shape)
    sizes = axes_of(x.device_mesh).sizes
    for p, n in zip(x.placements, sizes, strict=True):
        dim = getattr(p, "dim", None)
        if dim is None:
            continue
        if left[dim] % n:
            raise PlacementError.of(
                f"{name}, argument {path}",
                f"{ARGUMENT}, {axes_of(x.device_mesh)}, in shards of different sizes",
                fix="a DTensor on the whole mesh, or a size that the axis divides",
                arg_path=path,
                dim=dim,
            )
        left[dim] //= n


def _ranks(mesh: Any) -> list[int]:
    return mesh.mesh.flatten().tolist()


def _peer(mesh: Any, names: tuple[str, ...], rank: int, here: list[int]) -> int:
    """The rank of a part that has the coordinates of another rank on the axes of the part."""
    at = _coordinates(mesh, names, rank)
    peers = (
        other
        for other in here
        if _coordinates(mesh, names, other) == at
    )
    return next(peers)


def _coordinates(mesh: Any, names: tuple[str, ...], rank: int) -> list[int]:
    (place,) = (mesh.mesh == rank).nonzero().tolist()
    rows = zip(axes_of(mesh).names, place, strict=True)
    return [
        k
        for axis, k in rows
        if axis in names
    ]


@_compat.constant_in_graph
def rows_of_part(text: str, axes: Any) -> Any:
    """The axes of a DTensor of an argument, their sizes and its placements, if it is on a part of
    the mesh; else nothing.
    """
    sizes = dict(axes)
    rows = tuple(
        (name, sizes[name], said)
        for name, said in parse_placed(text)
    )
    is_on_part_alone = len(rows) < len(sizes)
    return rows if is_on_part_alone else ()


@_compat.read_by_dynamo
def entering(x: torch.Tensor, rows: Any, axes: Any) -> torch.Tensor:
    """Each rank's own tensor as a DTensor on a part of the mesh."""
    shards = print_shards([(name, n, 0) for name, n in axes])
    x = prims.to_local(x, shards).squeeze(0)
    local = tuple([int(n) for n in x.shape])
    made = checks.check_shape(ARGUMENT, rows, local, None)
    return joined(x, rows, made)


@_compat.read_by_dynamo
def said(x: torch.Tensor) -> str:
    """The placements and the shape of a DTensor on a part of the mesh, as text; else nothing."""
    part = x._part  # type: ignore[attr-defined]  # of capture/dtensors/table.py
    return print_part(part, numbers(x)) if part else ""


@_compat.read_by_dynamo
def leaving(x: torch.Tensor) -> torch.Tensor:
    """Each rank's own tensor of a DTensor on a part of the mesh."""
    part = x._part  # type: ignore[attr-defined]
    return to_local(x, part) if part else x


def of_part(x: torch.Tensor, text: str, mesh: Any) -> DTensor:
    """The DTensor on a part of the mesh of each rank's own tensor.

    Raises:
        PlacementError: in a simulated world, if the parts hold different values.
    """
    placed, shape = parse_part(text)
    rows = parse_placed(placed)
    part = mesh[tuple(name for name, _ in rows)]
    order = sorted(
        range(len(shape)),
        key=lambda dim: -x.stride(dim),
    )
    strides = dense_strides(shape, order)
    placements = tuple(
        placement_of(said)
        for _, said in rows
    )
    spec = _compat.dtensor_spec(
        part, placements, shape, strides, x.dtype
    )
    local = of_one_part(x, part)
    (made,) = dtensors([local], [spec])
    return made
