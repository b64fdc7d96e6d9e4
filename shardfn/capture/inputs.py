"""The inputs of a capture: fake tensors for the tensor arguments. Objects are closed over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import _compat, _tree, tree_pairs
from ..errors import CaptureError
from ..types import CONSTANTS, ShapeDtype
from .rewrites import strides


class Inputs(NamedTuple):
    """The inputs of the capture of a function."""

    name: str  # of the function
    leaves: list[Any]  # of (args, kwargs)
    treedef: _tree.TreeDef
    fakes: list[Any]  # the leaves, with fake tensors for tensors
    tensor_paths: list[str]
    paths: list[str]  # of the leaves

    @classmethod
    def like(
        cls,
        args: Any,
        kwargs: Any,
        paths: list[str],
        device: str,
        mode: _compat.FakeTensorMode,
        name: str,
    ) -> Inputs:
        """The inputs for arguments like these.

        Raises:
            CaptureError: a tensor without strides.
        """
        leaves, treedef = _tree.flatten((args, kwargs))
        strides.refuse_unstrided(name, leaves, paths)
        fakes = [_fake(mode, leaf, device) for leaf in leaves]
        pairs = zip(paths, fakes, strict=True)
        tensor_paths = [p for p, x in pairs if isinstance(x, torch.Tensor)]
        return cls(name, leaves, treedef, fakes, tensor_paths, paths)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The fake tensors."""
        return [x for x in self.fakes if isinstance(x, torch.Tensor)]

    @property
    def named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The path of each tensor, and its fake tensor."""
        return list(zip(self.tensor_paths, self.tensors, strict=True))

    @property
    def tensor_names(self) -> dict[int, str]:
        """The paths of the tensors, by leaf."""
        pairs = enumerate(zip(self.paths, self.fakes, strict=True))
        return {i: path for i, (path, x) in pairs if isinstance(x, torch.Tensor)}

    @property
    def positional(self) -> Any:
        """(args, kwargs), of fake tensors, with a row in place of each object that is a container."""
        return _apart(_tree.unflatten(self.treedef, self.fakes))[0]

    @property
    def objects(self) -> Any:
        """How `made` makes these objects."""
        return _apart(_tree.unflatten(self.treedef, self.fakes))[1]


def _fake(mode: _compat.FakeTensorMode, leaf: Any, device: str) -> Any:
    if isinstance(leaf, ShapeDtype):
        with mode:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
    if not isinstance(leaf, torch.Tensor):
        return leaf
    place = device if leaf.is_meta else leaf.device
    with mode:
        return torch.empty_strided(
            leaf.shape, leaf.stride(), dtype=leaf.dtype, device=place
        )


def holding(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], Any, Any]:
    """A function that closes over its object arguments, since Dynamo accepts objects only
    there.
    """
    odd = {i: x for i, x in enumerate(args) if _is_object(x)}
    named = {key: x for key, x in kwargs.items() if _is_object(x)}
    if not odd and not named:
        return fn, args, kwargs

    def held(*given: Any, **others: Any) -> Any:
        return fn(
            *[odd.get(i, x) for i, x in enumerate(given)],
            **{**others, **named},
        )

    return (
        held,
        tuple(None if i in odd else x for i, x in enumerate(args)),
        {**kwargs, **dict.fromkeys(named)},
    )


def _is_object(x: Any) -> bool:
    (leaf, *more), _ = _tree.flatten((x, None))
    return (
        leaf is x
        and len(more) == 1
        and not isinstance(x, (torch.Tensor, ShapeDtype, *CONSTANTS))
    )


def _apart(tree: Any) -> tuple[Any, Any]:
    """A tree with rows of children in place of the objects that are containers of classes that
    torch's pytree does not know, and how `made` makes them. None where there are none.
    """
    if not tree_pairs.is_node(tree):
        return tree, None
    way = None if _tree.is_plain(tree) else _compat.registered(type(tree))
    if way is None:
        children, context = [x for _, x in _tree.children(tree)], None
    else:
        children, context, _ = way.opened(tree)
    pairs = [_apart(x) for x in children]
    rows = [x for x, _ in pairs]
    inner = tuple(how for _, how in pairs)
    if way is not None:
        return tuple(rows), (way, context, inner)
    if not any(inner):
        return tree, None
    return _tree.like(tree, rows), (None, None, inner)


@_compat.read_by_dynamo
def made(tree: Any, how: Any, records: list[Any]) -> Any:
    """The tree that `_apart` took apart. Adds to a list for each record (the outermost record
    around it, itself, how it opens, its children).
    """
    if how is None:
        return tree
    way, context, inner = how
    given = tree.values() if isinstance(tree, dict) else tree
    first = len(records)
    pairs = zip(given, inner, strict=True)
    children = [made(x, below, records) for x, below in pairs]
    if way is None:
        return _tree.like(tree, children)
    closed = way.closed(context, children)
    if way.has_names:
        before = [list(x) if isinstance(x, list) else x for x in children]
        records.append((closed, closed, way.opened, before))
        for i in range(first, len(records)):
            records[i] = (closed, *records[i][1:])
    return closed


@_compat.read_by_dynamo
def lost_changes(records: list[Any], out: Any) -> list[str]:
    """The classes of the records that have other children than they were made with, and are no
    part of the result.
    """
    found = []
    for outer, x, opened, before in records:
        after = opened(x)[0]
        if not _are_same(before, after) and not _holds(out, outer):
            found.append(type(outer).__name__)
    return found


@_compat.read_by_dynamo
def _are_same(before: list[Any], after: list[Any]) -> bool:
    """Whether two lists have the same tensors and objects."""
    if len(before) != len(after):
        return False
    for x, y in zip(before, after, strict=True):
        if isinstance(x, list) and isinstance(y, list):
            if not _are_same(x, y):
                return False
        elif x is not y:
            return False
    return True


@_compat.read_by_dynamo
def _holds(tree: Any, x: Any) -> bool:
    """Whether a tree has an object among its parts."""
    if tree is x:
        return True
    if isinstance(tree, dict):
        return any([_holds(child, x) for child in tree.values()])
    if isinstance(tree, (list, tuple)):
        return any([_holds(child, x) for child in tree])
    return False


@_compat.constant_in_graph
def refuse_lost(name: str, kinds: list[str]) -> None:
    """Refuse a function that changes an argument which its caller has.

    Raises:
        CaptureError: it does.
    """
    if kinds:
        raise CaptureError.of(
            name,
            f"it changes its argument, a {kinds[0]}, and the caller would not see it",
            needed="a function that returns what it changes",
            fix=f"return the {kinds[0]}, and go on with the one that the call returns",
        )
