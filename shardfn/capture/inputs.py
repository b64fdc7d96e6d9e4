"""The arguments of a call, flattened once, and the inputs of its capture: fake tensors for the
tensor arguments. Objects are closed over.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import attrs
import torch

from .. import _compat, _tree
from ..types import CONSTANTS, ShapeDtype
from .reading import container_objects


@attrs.frozen(eq=False, repr=False)
class Arguments:
    """The arguments of one call, flattened once: the record that all stages take.

    Args:
        args: the positional arguments.
        kwargs: the keyword arguments.
        leaves: of (args, kwargs).
        treedef: the structure of (args, kwargs).
        paths: of the leaves.
        signature: of the user's function; None if it has none.
        names: of the positional arguments.
        static: which positional arguments are static.
        donated: which positional arguments are donated.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    treedef: _tree.TreeDef
    paths: Sequence[str]
    signature: inspect.Signature | None = None
    names: tuple[str, ...] = ()
    static: tuple[int, ...] = ()
    donated: tuple[int, ...] = ()

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], paths: Sequence[str]) -> Arguments:
        """The arguments of a call of which only the paths are known."""
        return cls(args, kwargs, *_tree.flatten((args, kwargs)), paths)

    @property
    def opened(self) -> tuple[Any, Any]:
        """(args, kwargs), in which tensors that hold others are containers: what a prefix tree is
        spread over.
        """
        classes = _tree.container_classes(self.treedef)
        if not any(issubclass(kind, torch.Tensor) for kind in classes):
            return self.args, self.kwargs
        return _tree.unflatten(self.treedef, [None] * len(self.leaves))

    def places(self, numbers: Sequence[int]) -> set[int]:
        """Which leaves are of these positional arguments."""
        counts = [child.num_leaves for child in self.treedef.children()[0].children()]
        return {i for n in numbers for i in range(sum(counts[:n]), sum(counts[: n + 1]))}


class Inputs(NamedTuple):
    """The inputs of the capture of a function."""

    name: str  # of the function
    leaves: list[Any]  # of (args, kwargs)
    fakes: list[Any]  # the leaves, with fake tensors for tensors
    tensors: list[torch.Tensor]  # the fake tensors
    tensor_names: dict[int, str]  # the paths of the tensors, by leaf
    paths: Sequence[str]  # of the leaves
    positional: Any  # (args, kwargs), of fake tensors, with a row in place of each object
    objects: Any  # how `container_objects.remade_tree` makes these objects
    asked: _compat.Asked  # what the function has asked of its tensors

    @property
    def tensor_paths(self) -> list[str]:
        """The paths of the tensors."""
        return list(self.tensor_names.values())

    @property
    def named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The path of each tensor, and its fake tensor."""
        return list(zip(self.tensor_paths, self.tensors, strict=True))


def inputs_like(
    arguments: Arguments, device: str, mode: _compat.FakeTensorMode, name: str
) -> Inputs:
    """The inputs for arguments like these."""
    leaves, paths = arguments.leaves, arguments.paths
    fakes = [_fake(mode, leaf, device) for leaf in leaves]
    places = [i for i, x in enumerate(fakes) if isinstance(x, torch.Tensor)]
    opened = container_objects.opened_tree(_tree.unflatten(arguments.treedef, fakes))
    tensors = [fakes[i] for i in places]
    asked = _compat.Asked(leaves)
    for i in places:
        _compat.stand_in(fakes[i], asked, i)
    names = {i: paths[i] for i in places}
    return Inputs(name, leaves, fakes, tensors, names, paths, *opened, asked)


def _fake(mode: _compat.FakeTensorMode, leaf: Any, device: str) -> Any:
    if isinstance(leaf, ShapeDtype):
        with mode:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
    if not isinstance(leaf, torch.Tensor):
        return leaf
    place = device if leaf.is_meta else leaf.device
    with mode:
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=place)


def holding(fn: Callable[..., Any], arguments: Arguments) -> tuple[Callable[..., Any], Arguments]:
    """A function that closes over its object arguments, since Dynamo accepts objects only
    there, and the arguments with None in place of each.
    """
    children = [child for side in arguments.treedef.children() for child in side.children()]
    if not any(child.is_leaf() for child in children):
        return fn, arguments
    count = len(arguments.args)
    keys = [*range(count), *arguments.kwargs]
    leaves = list(arguments.leaves)
    found = {}
    at = 0
    for key, child in zip(keys, children, strict=True):
        if child.is_leaf() and _is_object(leaves[at]):
            found[key] = leaves[at]
            leaves[at] = None
        at += child.num_leaves
    if not found:
        return fn, arguments
    named = {key: x for key, x in found.items() if isinstance(key, str)}

    def held(*given: Any, **others: Any) -> Any:
        return fn(*[found.get(i, x) for i, x in enumerate(given)], **{**others, **named})

    return held, attrs.evolve(arguments, leaves=leaves)


def _is_object(x: Any) -> bool:
    return not isinstance(x, (torch.Tensor, ShapeDtype, *CONSTANTS))
