"""The placements of the carries of loops: a search over walks, one mesh axis after the other.

The steps of a loop cost as often as they run, and the placement of a carry decides the collectives
of each of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

from ...types import Mark, Marks, MeshAxes
from .. import layout
from .price import ABOUT, PlanPrice

Carries = dict[tuple[int, ...], Marks]  # by shape
LARGEST = 2  # shapes that are searched
ROUNDS = 3  # over all axes: the best on one depends on the others


def searched(carried: Carries, axes: MeshAxes, price: Callable[[Carries], PlanPrice]) -> Carries:
    """The cheapest placements of the largest carries.

    Args:
        carried: the placements that propagation found for them.
        axes: of the mesh.
        price: of the program with such placements.
    """
    best: Carries = {}
    if not carried:
        return best
    least = price(best)
    largest = sorted(carried, key=math.prod, reverse=True)[:LARGEST]
    seen = [best]
    for _ in range(ROUNDS):
        before = best
        for shape, axis in itertools.product(largest, range(len(axes.sizes))):
            now = best.get(shape, carried[shape])
            for marks in _others(shape, now, axis, axes):
                tried = {**best, shape: marks}
                if tried in seen:
                    continue
                seen.append(tried)
                found = price(tried)
                if is_better(found, least):
                    best, least = tried, found
        if best == before:
            break
    return best


def is_better(found: PlanPrice, least: PlanPrice) -> bool:
    """Whether a program takes less time, or about the same with fewer bytes."""
    if found.total * ABOUT < least.total:
        return True
    if least.total * ABOUT < found.total:
        return False
    return (found.nbytes, found.total) < (least.nbytes, least.total)


def _others(shape: tuple[int, ...], now: Marks, axis: int, axes: MeshAxes) -> Iterator[Marks]:
    """The other placements on one axis, of dims with at least one element for each rank."""
    marks: list[Mark] = ["R"]
    for dim, size in enumerate(shape):
        if size >= axes.sizes[axis]:
            marks.append(dim)
    for mark in marks:
        wanted = (*now[:axis], mark, *now[axis + 1 :])
        plain = layout.canonical(shape, wanted, axes.sizes)
        if mark != now[axis] and plain == wanted:
            yield wanted
