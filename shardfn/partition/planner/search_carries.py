"""The placements of the carries of loops: a search over walks, one mesh axis after the other.

The steps of a loop cost as often as they run, and the placement of a carry decides the collectives
of each of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

from ...types import AxisPlacement, MeshAxes, MeshPlacements
from .. import layout
from .plan_price import ABOUT, PlanPrice

Carries = dict[tuple[int, ...], MeshPlacements]  # by shape
LARGEST = 2  # shapes that are searched
ROUNDS = 3  # over all axes: the best on one depends on the others


def search_carries(
    carried: Carries, axes: MeshAxes, price: Callable[[Carries], PlanPrice]
) -> Carries:
    """Search the placements of the largest loop carries, one mesh axis after the other.

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
    free = [k for k, name in enumerate(axes.names) if name not in axes.closed]
    for _ in range(ROUNDS):
        before = best
        for shape, axis in itertools.product(largest, free):
            now = best.get(shape, carried[shape])
            for placements in _others(shape, now, axis, axes):
                tried = {**best, shape: placements}
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
    """Return whether a price takes less time, or about the same with fewer bytes."""
    if found.total * ABOUT < least.total:
        return True
    if least.total * ABOUT < found.total:
        return False
    return (found.nbytes, found.total) < (least.nbytes, least.total)


def _others(
    shape: tuple[int, ...], now: MeshPlacements, axis: int, axes: MeshAxes
) -> Iterator[MeshPlacements]:
    """Yield the other placements of a carry on one axis."""
    placements: list[AxisPlacement] = ["R"]
    for dim, size in enumerate(shape):
        if size >= axes.sizes[axis]:
            placements.append(dim)
    for placement in placements:
        wanted = (*now[:axis], placement, *now[axis + 1 :])
        plain = layout.canonical(shape, wanted, axes.sizes)
        if placement != now[axis] and plain == wanted:
            yield wanted
