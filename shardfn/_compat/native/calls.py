"""Checks of a repeated call's arguments, each one C++ function over all tensors, or its Python
twin.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..dynamo.guards import tensor_guards
from ..memory import ORDINARY
from .library import native

DTENSOR = frozenset({DTensor})
_local = operator.attrgetter("_local_tensor")
_spec = operator.attrgetter("_spec")


class SameTensors:
    """A check that a list of tensors has the classes, shapes, strides, dtypes, devices and
    `requires_grad` of an example list.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.guard = tensor_guards(tensors)
        self.record: Any = None  # C++'s

    def __call__(self, tensors: list[Any]) -> bool:
        functions = native()
        if functions is None:
            return self.guard(*tensors)
        if self.record is not None:
            return functions.same_tensors(self.record, tensors)
        is_same = self.guard(*tensors)
        if is_same:
            self.record = functions.layouts(tensors)
        return is_same


class Leaves:
    """A function that flattens a tree to its leaves, if it has a known structure; else None.

    Args:
        said: the structure: None for a leaf, else its class, the keys of a dict, its children.
        walk: adds the leaves of a tree to a list. Whether the tree has the structure.
    """

    def __init__(self, said: Any, walk: Callable[[Any, list[Any]], bool]) -> None:
        self.said, self.walk = said, walk
        self.record: Any = None  # C++'s; False if it has none

    def __call__(self, tree: Any) -> list[Any] | None:
        functions = native()
        if functions is not None:
            if self.record is None:
                self.record = functions.structure(self.said) or False
            if self.record:
                return functions.leaves_of(self.record, tree)
        leaves: list[Any] = []
        return leaves if self.walk(tree, leaves) else None


def are_dtensors(tensors: list[Any], specs: list[Any]) -> bool:
    """Check that tensors are DTensors of exactly these specs, over ordinary tensors, and require
    no gradient.
    """
    functions = native()
    if functions is not None:
        return functions.are_dtensors(tensors, specs)
    return (
        DTENSOR.issuperset(map(type, tensors))
        and ORDINARY.issuperset(map(type, map(_local, tensors)))
        and all(map(operator.is_, map(_spec, tensors), specs))
        and not torch._C._any_requires_grad(*tensors)
    )


def locals_of(tensors: list[Any]) -> list[torch.Tensor]:
    """Return the local tensors of DTensors."""
    functions = native()
    found = None if functions is None else functions.locals_of(tensors)
    return list(map(_local, tensors)) if found is None else found


def put_specs(tensors: Sequence[Any], specs: Sequence[Any]) -> None:
    """Assign other specs to DTensors."""
    for x, spec in zip(tensors, specs, strict=True):
        x._spec = spec


def exchanged(leaves: list[Any], *about: Any) -> list[Any] | None:
    """Move the memory of donated leaves to new objects, and return the leaves. None, with
    nothing changed, if only Python can tell whether they can be donated.

    Args:
        leaves: of the arguments.
        about: the positions of the donated and of the other tensors, the closed-over tensors,
            the donated of an earlier call, the class of a donated tensor, and for DTensors the
            spec that each gets.
    """
    functions = native()
    return None if functions is None else functions.exchanged(leaves, *about)


def placed_again(
    results: Sequence[Any],
    specs: list[Any],
    spares: list[DTensor],
    places: tuple[int, ...],
    make: Callable[[Sequence[Any], Sequence[Any]], list[DTensor]],
) -> list[Any]:
    """Wrap local tensors as DTensors, reusing spare DTensor objects where a position is given.

    Args:
        results: the local tensors.
        specs: of the DTensors.
        spares: DTensors that nothing refers to.
        places: of each result among them; -1 without one.
        make: makes other DTensors.
    """
    functions = native()
    given = list(results)
    if functions is not None:
        placed = functions.placed_again(given, specs, spares, places)
    else:
        placed = list(map(_put, given, specs, repeat(spares), places))
    new = [k for k, place in enumerate(places) if place < 0] if -1 in places else []
    made = make([given[k] for k in new], [specs[k] for k in new]) if new else []
    for k, x in zip(new, made, strict=True):
        placed[k] = x
    return placed


def _put(x: Any, spec: Any, spares: list[Any], place: int) -> Any:
    """Set the local tensor and spec of a spare DTensor; return x itself if its position is
    negative.
    """
    if place < 0:
        return x
    spare = spares[place]
    spare._local_tensor, spare._spec = x, spec
    return spare
