"""The parameters that placements are for: paths, shapes, and the layers that hold them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from ... import _tree
from ...errors import PlacementError, TreeError
from ...placement import P, Stage, as_stage, marks_of
from ...placement_table import Leaf
from ...types import MeshAxes, ShapeDtype


@attrs.frozen
class Params:
    """A tree of parameters. None stands for a constant, which has no placement."""

    leaves: tuple[Leaf | None, ...]
    treedef: Any

    @property
    def tensors(self) -> list[Leaf]:
        return [leaf for leaf in self.leaves if leaf is not None]

    def filled(self, specs: Mapping[str, Any]) -> Any:
        """The tree with the placement of each parameter, given by path."""
        found = [None if leaf is None else specs[leaf.path] for leaf in self.leaves]
        return _tree.unflatten(self.treedef, found)


def params_of(where: str, tree: Any, module: Any = None) -> Params:
    """The parameters of a tree.

    Args:
        where: the function, for errors.
        tree: a dict of tensors, DTensors or ShapeDtypes, perhaps with trees in it.
        module: the nn.Module that they belong to, or None.

    Raises:
        TreeError: the tree is not a dict, or the module is not a module.
    """
    if not isinstance(tree, dict):
        of_module = isinstance(tree, (torch.nn.Module, Iterator))
        fix = "dict(module.named_parameters())" if of_module else '{"params": params}, and '
        fix += "" if of_module else 'read the placements at ["params"]'
        raise TreeError.of(
            f"{where}, params",
            f"a {type(tree).__name__}",
            needed="a dict of parameters, such as functionalize returns, or a dict of trees",
            fix=fix,
            arg_path="params",
        )
    if module is not None and not isinstance(module, torch.nn.Module):
        raise TreeError.of(
            f"{where}, module",
            f"a {type(module).__name__}",
            needed="an nn.Module, or None",
            arg_path="module",
        )
    _tree.learn(tree)
    plain = dict(tree)
    ties = _ties(module)
    leaves = tuple(_leaf(path, x, ties) for path, x in _tree.named_leaves(plain))
    return Params(leaves, _tree.flatten(plain)[1])


def _leaf(path: str, x: Any, ties: Mapping[str, tuple[str, ...]]) -> Leaf | None:
    if not isinstance(x, (torch.Tensor, ShapeDtype)):
        return None
    return Leaf(path, tuple(x.shape), x.dtype, ties.get(path, (path,)))


def _ties(module: torch.nn.Module | None) -> dict[str, tuple[str, ...]]:
    """All names of each parameter that has several, by each of them."""
    if module is None:
        return {}
    names = defaultdict[int, list[str]](list)
    for name, x in module.named_parameters(remove_duplicate=False):
        names[id(x)].append(name)
    return {
        name: (name, *(other for other in tied if other != name))
        for tied in names.values()
        if len(tied) > 1
        for name in tied
    }


def checked_axes(where: str, mesh_axes: MeshAxes | None, axis: Any) -> tuple[str, ...]:
    """The mesh axes that an `axis` names, in the order of the mesh.

    Raises:
        PlacementError: the mesh lacks one, or they are not distinct names.
    """
    names = (axis,) if isinstance(axis, str) else axis
    are_names = isinstance(names, (tuple, list)) and all(isinstance(name, str) for name in names)
    if not are_names or not names or len(set(names)) != len(names):
        raise PlacementError.of(
            f"{where}, axis", f"it is {axis!r}", needed="a name, or a tuple of distinct names"
        )
    if mesh_axes is None:
        return tuple(names)
    unknown = [name for name in names if name not in mesh_axes.names]
    if unknown:
        raise PlacementError.of(
            f"{where}, axis",
            f"axis names {', '.join(map(repr, unknown))}, but the mesh has {mesh_axes}",
            fix=" or ".join(map(repr, mesh_axes.names)),
        )
    return tuple(name for name in mesh_axes.names if name in names)


def check_fit(
    where: str, leaves: Sequence[Leaf], specs: Mapping[str, Any], axes: MeshAxes | None
) -> None:
    """Check that each placement fits its parameter, and the mesh where it is known.

    Raises:
        PlacementError: lists those that do not.
    """
    wrong = []
    for leaf in leaves:
        spec = specs[leaf.path]
        try:
            if spec is not None:
                marks_of(spec, leaf.shape, axes or assumed_axes(spec))
        except ValueError as error:
            wrong.append(f"{leaf.path}: {error}")
    if wrong:
        raise PlacementError.of(where, *wrong, fix="give placements that fit each parameter")


def assumed_axes(spec: Any) -> MeshAxes:
    """Axes of a mesh that is not known: those that a placement names."""
    if not isinstance(spec, P):
        placements = spec if isinstance(spec, list) else [spec]
        names = tuple(f"axis {i}" for i in range(len(placements)))
        return MeshAxes(names, tuple(map(_least_size, placements)))
    rows = [(part,) if isinstance(part, str) else part for part in spec.parts if part]
    named = [part for row in rows if isinstance(row, tuple) for part in row]
    # without a number of blocks; other parts than names are refused later
    sizes = {str(part).partition("*")[0]: 1 for part in named}
    sizes |= {axis: _least_size(as_stage(stage)) for axis, stage in spec.stages.items()}
    return MeshAxes(tuple(sizes), tuple(sizes.values()))


def _least_size(placement: Any) -> int:
    """The size of the smallest axis that has a placement. Other stages than numbers are refused
    later.
    """
    coordinate = placement.coordinate if isinstance(placement, Stage) else 0
    return max(coordinate, 0) + 1 if type(coordinate) is int else 1
