"""How the arguments of a call differ from those that a program was compiled for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _tree
from ...capture import constant_key
from ...partition import layout
from ...placement import marks_of
from ...simulated import SimulatedTensor, UnreadTensor
from ..options import Request
from .placed import Placed

OF_RANKS = (SimulatedTensor, UnreadTensor)  # each rank's own, which no program takes


def other_leaves(request: Request, placed: Placed, leaves: list[Any], treedef: Any) -> list[str]:
    """Lines for the leaves of two trees of arguments that have no counterpart."""
    now, before = _tree.unflatten(treedef, leaves), _indices(placed.treedef)
    names = _tree.argument_paths(request.signature_of, *now)
    gone = _lacking(before, placed.paths, now)
    new = _lacking(now, names, before)
    if new or gone:
        return [
            *(f"{path}: missing" for path in gone),
            *(f"{path}: the program has no such leaf" for path in new),
        ]
    kinds, wanted = (_tree.containers(t) for t in (treedef, placed.treedef))
    return [f"the containers are {kinds}, the program is for {wanted}"]


def _indices(treedef: Any) -> Any:
    """A tree with the position of each leaf."""
    return _tree.unflatten(treedef, range(treedef.num_leaves))


def _lacking(tree: Any, names: Sequence[str], other: Any) -> list[str]:
    """The names of the leaves of a tree that another tree has no leaf for."""
    known = set(_tree.paths(other))
    places = _tree.paths(tree)
    return [n for place, n in zip(places, names, strict=True) if place not in known]


def other_tensors(placed: Placed, leaves: list[Any]) -> Iterator[str]:
    """Lines for the tensors whose shape, dtype or placement differs from the program's."""
    rows = zip(placed.tensors, placed.marks, placed.avals, strict=True)
    for i, marks, aval in rows:
        x, path = leaves[i], placed.paths[i]
        is_tensor = isinstance(x, torch.Tensor) and type(x) not in OF_RANKS
        if not is_tensor or (tuple(x.shape), x.dtype) != (aval.shape, aval.dtype):
            yield f"{path}: {said(x)}, the program is for {aval.shape} {aval.dtype}"
            continue
        if not isinstance(x, DTensor):
            continue
        own = marks_of(list(x.placements), x.shape, placed.axes)
        if not layout.agree(own, marks, placed.axes.sizes):
            wanted = f"the program is for {marks} on {placed.axes.names}"
            yield f"{path}: placed {x.placements}, {wanted}"


def other_constants(placed: Placed, leaves: list[Any]) -> Iterator[str]:
    """Lines for the constants that differ from the program's."""
    for i, key, old in placed.constants:
        if constant_key(leaves[i]) != key:
            yield f"{placed.paths[i]}: {said(leaves[i])}, the program is for {old!r}"


def said(x: Any) -> str:
    """A leaf in an error: a tensor by its shape and dtype."""
    return f"{tuple(x.shape)} {x.dtype}" if isinstance(x, torch.Tensor) else repr(x)
