"""The conversion of a batch to DTensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _compat, _tree, tree_pairs
from ...errors import PlacementError, TreeError
from ...mesh import all_coordinates, axes_of
from ...partition import layout
from ...placement import P, check_whole, is_spec, marks_of, torch_placements
from ...runtime.layouts import cut
from ...simulated import SimulatedTensor, UnreadTensor, dtensors, shown
from ...types import MeshPlacements
from ...world import current_world
from .samples import described
from .sources import Batch

SHOWN = 8  # leaves in a message


def rows_of(placements: Any) -> P | None:
    """Return the placement of dim 0 if all placements of a tree shard it alike, else None."""
    specs = _tree.flatten(placements, is_spec)[0]
    if not specs or not all(isinstance(spec, P) for spec in specs):
        return None
    firsts = {spec.parts[:1] for spec in specs}
    (first, *others) = firsts
    return None if others or not first or not first[0] else P(*first)


def share_of(n: int, spec: P, mesh: Any) -> list[int]:
    """Compute the rows, out of n, that this rank reads."""
    axes = axes_of(mesh)
    marks = marks_of(spec, (n,), axes)
    return cut(torch.arange(n), marks, axes, mesh.get_coordinate()).tolist()


def placed(batch: Batch, mesh: Any, placements: Any) -> Any:
    """The batch with DTensors for tensors. Other leaves stay as they are.

    Args:
        batch: as it was read.
        mesh: a DeviceMesh.
        placements: a prefix tree over the batch.

    Raises:
        TreeError: placements that do not match the batch.
        PlacementError: placements that do not fit a tensor; a batch that is not made row by row.
    """
    tree = batch.tree
    if isinstance(tree, Mapping) and not isinstance(tree, dict):
        tree = dict(tree)
    leaves, treedef = _tree.flatten(tree)
    paths = [f"batch{path}" for path in _tree.paths(tree)]
    try:
        specs = tree_pairs.broadcast_prefix(placements, tree, is_spec)
    except ValueError as error:
        got = "the placements do not match a batch"
        raise TreeError.of("loader", got, *error.args) from None
    out, wrong = [], []
    for x, spec, path in zip(leaves, specs, paths, strict=True):
        try:
            out.append(_placed(x, spec, batch, mesh))
        except ValueError as error:
            wrong.append(f"{path}: {error}")
    if wrong:
        fix = "give placements that fit each tensor"
        if batch.rows is not None:
            fix += "; or rows=False, with which each rank reads the global batch"
        raise PlacementError.of("loader", *wrong, fix=fix, mesh=mesh)
    return _tree.unflatten(treedef, out)


def _placed(x: Any, spec: Any, batch: Batch, mesh: Any) -> Any:
    """Place one tensor of a batch as a DTensor.

    Raises:
        ValueError: says why it does not fit.
    """
    if not isinstance(x, torch.Tensor):
        if batch.rows is not None:
            raise ValueError(f"{described(x)} is not a tensor, so it has no rows")
        return x
    if isinstance(x, DTensor):
        raise ValueError("a DTensor, which has placements already")
    axes = axes_of(mesh)
    shape = tuple(x.shape)
    if batch.rows is not None:
        _check_rows(x, batch)
        shape = (batch.rows, *shape[1:])
        x = x[: batch.mine]
    is_placed = spec is not None
    marks = marks_of(spec, shape, axes) if is_placed else ("R",) * len(axes.names)
    check_whole(spec, marks)
    rest = marks if batch.rows is None else tuple(map(_but_rows, marks))
    x = x.detach().contiguous().to(_device(mesh))

    def local_at(coordinate: Any) -> torch.Tensor:
        own = cut(x, rest, axes, coordinate)
        return own.clone() if own is x else own

    kind = current_world().kind
    if kind == "simulated":
        every = [local_at(c) for c in all_coordinates(axes)]
        local: Any = SimulatedTensor(every, shown(mesh))
    else:
        local = local_at(mesh.get_coordinate())
        local = UnreadTensor(local) if kind == "fake" else local
    return _dtensor(local, shape, x.dtype, marks, mesh)


def _check_rows(x: torch.Tensor, batch: Batch) -> None:
    """Check that a leaf has the rows that were read.

    Raises:
        ValueError: it has others.
    """
    count = batch.mine or 1
    if x.dim() == 0 or x.shape[0] != count:
        raise ValueError(
            f"{described(x)} must have the {count} rows that were read from the dataset"
        )


def _but_rows(mark: Any) -> Any:
    """Drop a shard of dim 0 from a placement: the rows were read as a shard already."""
    found = layout.split(mark)
    return "R" if found and found[0] == 0 else mark


def _device(mesh: Any) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(mesh.device_type)
    return torch.device(mesh.device_type, module.current_device())


def _dtensor(
    local: Any, shape: Sequence[int], dtype: torch.dtype, marks: MeshPlacements, mesh: Any
) -> DTensor:
    strides = layout.dense_strides(shape, range(len(shape)))
    spec = _compat.dtensor_spec(mesh, torch_placements(marks), tuple(shape), strides, dtype)
    return dtensors([local], [spec])[0]


def shapes_of(batch: Batch) -> str:
    """The shapes of a batch as text, which is equal on all ranks."""
    sharded = () if batch.rows is None else (0,)
    rows = zip(_tree.paths(batch.tree), _tree.leaves(batch.tree), strict=True)
    texts = [f"batch{path} {described(x, sharded)}" for path, x in rows]
    more = [f"and {len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
    return ", ".join(texts[:SHOWN] + more)
