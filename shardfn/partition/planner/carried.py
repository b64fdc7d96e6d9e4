"""The placements of the carries of loops: a search over walks, one mesh axis after the other.

The steps of a loop cost as often as they run, and the placement of a carry decides the collectives
of each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from ...types import Mark, Marks, MeshAxes
from .. import layout
from .price import PlanPrice

Carries = dict[tuple[int, ...], Marks]  # by shape
LARGEST = 2  # shapes that are searched


def searched(
    carried: Carries, axes: MeshAxes, price: Callable[[Carries], PlanPrice]
) -> Carries:
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
    for shape in largest:
        for axis in range(len(axes.sizes)):
            now = best.get(shape, carried[shape])
            for marks in _others(shape, now, axis, axes):
                tried = {**best, shape: marks}
                found = price(tried)
                if found.total < least.total:
                    best, least = tried, found
    return best


def _others(
    shape: tuple[int, ...], now: Marks, axis: int, axes: MeshAxes
) -> Iterator[Marks]:
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
