"""The captures of code of one rank whose ranks have shards of different sizes: one for each kind of
rank.
"""

from __future__ import annotations

from typing import Any

import attrs

from ...capture import Captured, own_sizes
from ...errors import TreeError
from ...mesh import all_coordinates
from ...types import TENSOR
from ..arguments import Placed
from ..options import Request
from .known import captured_for

Coordinate = tuple[int, ...]


@attrs.frozen(eq=False, repr=False)
class Kind:
    """Ranks that share a program, and its capture."""

    request: Request
    ranks: tuple[Coordinate, ...]
    captured: Captured


def kinds_of_ranks(
    request: Request, args: Any, kwargs: Any, placed: Placed
) -> list[Kind]:
    """The kinds of ranks, that of this rank first.

    Raises:
        CaptureError, PlacementError: their programs do not fit each other.
        TreeError: their results do not.
    """
    kinds = _captured(request, args, kwargs, placed)
    readings = [kind.captured.traits for kind in kinds]
    differing = own_sizes.differing(request.name, readings)
    if differing:
        request = _asking(request, differing=differing)
        kinds = _captured(request, args, kwargs, placed)
    for other in kinds[1:]:
        _refuse_other_results(request.name, kinds[0].captured, other.captured)
    return kinds


def _captured(
    request: Request, args: Any, kwargs: Any, placed: Placed
) -> list[Kind]:
    mine = placed.coordinate
    left = [mine, *(c for c in all_coordinates(placed.axes) if c != mine)]
    kinds = []
    while left:
        own = _asking(request, rank=left[0])
        found = captured_for(own, args, kwargs, placed)
        names = placed.axes.names
        fitting = [
            c for c in left if own_sizes.fits(found.cuts, names, c)
        ]
        kinds.append(Kind(own, tuple(fitting), found))
        left = [c for c in left if c not in fitting]
    return kinds


def _asking(request: Request, **changes: Any) -> Request:
    """The request with other fields, made once."""
    key = tuple(changes.items())
    known = request.store.followed
    if key not in known:
        known[key] = attrs.evolve(request, **changes)
    return known[key]


def _refuse_other_results(name: str, a: Captured, b: Captured) -> None:
    """Refuse results of another structure on each rank."""
    rows = [
        (x.program.out_tree, [leaf is TENSOR for leaf in x.program.out_leaves])
        for x in (a, b)
    ]
    if rows[0] != rows[1]:
        got = "ranks whose shards have other sizes return other trees"
        fix = "one tree of tensors for every size"
        raise TreeError.of(name, got, fix=fix)
    if a.outside.draws != b.outside.draws or not _is_same(a, b):
        got = "ranks whose shards have other sizes read other tensors, or draw other numbers"
        fix = "the same closed-over tensors and random calls for every size"
        raise TreeError.of(name, got, fix=fix)


def _is_same(a: Captured, b: Captured) -> bool:
    """Whether two captures close over the same tensors."""
    return [*map(id, a.outside.shared)] == [*map(id, b.outside.shared)]
