"""The empty tensors into which a checkpoint is read, with the requested placements."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _compat, _tree, tree_pairs
from ...errors import FakeValueError, PlacementError, TreeError
from ...mesh import all_coordinates, axes_of, check_mesh, refuse_unusable_mesh
from ...partition import layout
from ...placement import check_whole, is_spec, marks_of, torch_placements
from ...simulated import SimulatedTensor, dtensors, shown
from ...types import MeshPlacements
from ...world import current_world
from .contents import named, shape_of

Placed = tuple[Any, MeshPlacements]  # a mesh, and a placement for each of its axes


def placed_leaves(where: str, like: Any, mesh: Any, placements: Any) -> dict[str, Placed | None]:
    """Determine the mesh and placements of each leaf; None for plain tensors and constants.

    Args:
        where: the function, for its errors.
        like: a tree of tensors, DTensors, ShapeDtypes and constants.
        mesh: of the placements, or None.
        placements: a prefix tree over `like`; None keeps the placements of a DTensor, and
            loads other leaves as plain tensors.

    Raises:
        TreeError, PlacementError: placements that do not match the tree, its shapes or the mesh.
    """
    leaves = named(where, like)
    if mesh is None and placements is not None:
        got = "placements are given, but no mesh"
        raise PlacementError.of(where, got, fix="pass mesh=", arg_path="mesh")
    if mesh is not None:
        check_mesh(where, mesh)
        refuse_unusable_mesh(where, mesh)
    try:
        specs = tree_pairs.broadcast_prefix(placements, like, is_spec)
    except ValueError as error:
        got = "the placements do not match the given tree"
        raise TreeError.of(where, got, *error.args) from None
    out: dict[str, Placed | None] = {}
    wrong: list[str] = []
    for (name, x), spec in zip(leaves.items(), specs, strict=True):
        try:
            out[name] = _placed(x, mesh, spec)
        except ValueError as error:
            wrong.append(f"{name}: {error}")
    if wrong:
        fix = "give placements that fit each tensor"
        raise PlacementError.of(where, *wrong, fix=fix, mesh=mesh)
    return out


def _placed(x: Any, mesh: Any, spec: Any) -> Placed | None:
    found = shape_of(x)
    if found is None:
        return None
    if spec is not None:
        marks = marks_of(spec, found[0], axes_of(mesh))
        check_whole(spec, marks)
        return mesh, marks
    if not isinstance(x, DTensor):
        return None
    own = x.device_mesh
    return own, marks_of(list(x.placements), found[0], axes_of(own))


def empty(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, placed: Placed | None
) -> torch.Tensor:
    """Make an uninitialized tensor or DTensor to read into.

    Args:
        shape: global shape.
        dtype: torch dtype.
        device: of its memory.
        placed: its mesh and placements; None for a plain tensor.
    """
    if placed is None:
        return torch.empty(shape, dtype=dtype, device=device)
    mesh, marks = placed
    axes = axes_of(mesh)
    strides = layout.dense_strides(shape, range(len(shape)))
    spec = _compat.dtensor_spec(mesh, torch_placements(marks), shape, strides, dtype)

    def local(coordinates: Any) -> torch.Tensor:
        own = layout.local_shape(shape, marks, axes.sizes, coordinates)
        return torch.empty(own, dtype=dtype, device=device)

    if current_world().kind == "simulated":
        shards = [local(c) for c in all_coordinates(axes)]
        return dtensors([SimulatedTensor(shards, shown(mesh))], [spec])[0]
    return dtensors([local(mesh.get_coordinate())], [spec])[0]


def refuse_without_values(where: str) -> None:
    """Refuse to load in a world without values (`numerics=False`).

    Raises:
        FakeValueError: it has numerics=False.
    """
    if current_world().kind == "fake":
        fix = "fake_world(n), which has values"
        got = "a world with numerics=False has no values"
        raise FakeValueError.of(where, got, fix=fix)


def device_of(x: Any) -> torch.device:
    """Return the device that a leaf is loaded to: that of `like`."""
    return x.device if isinstance(x, torch.Tensor) else torch.device("cpu")


def refilled(like: Any, leaves: dict[str, Any]) -> Any:
    """Rebuild the tree with other leaves, by name."""
    _, treedef = _tree.flatten(like)
    return _tree.unflatten(treedef, list(leaves.values()))
