"""The captures of code of one rank whose ranks have shards of different sizes: one for each kind of
rank.
"""

from __future__ import annotations

import math
from typing import Any

import attrs

from ... import _compat, _tree
from ...capture import Arguments, Captured, uneven_shards
from ...errors import TreeError, call_site
from ...mesh import all_coordinates
from ...types import TENSOR
from ..arguments import Placed, place
from ..options import Request
from .known import captured_for

Coordinate = tuple[int, ...]


@attrs.frozen(eq=False, repr=False)
class Kind:
    """A group of ranks with equal local shapes, which share a program: its arguments and its
    capture.
    """

    ranks: tuple[Coordinate, ...]
    placed: Placed
    captured: Captured


def kinds_of_ranks(request: Request, arguments: Arguments, placed: Placed) -> list[Kind]:
    """Capture per-rank code once for each kind of rank, this rank's kind first.

    Raises:
        CaptureError, PlacementError: their programs do not fit each other; a gradient would be
            lost.
        TreeError: their results do not.
    """
    kinds = _captured(request, arguments, placed)
    readings = [kind.captured.traits for kind in kinds]
    differing = uneven_shards.differing(request.name, readings)
    if differing:
        request = _asking(request, differing=differing)
        kinds = _captured(request, arguments, placed)
    for other in kinds[1:]:
        _refuse_other_results(request.name, kinds[0].captured, other.captured)
    for kind in kinds:
        kind.captured.outside.refuse_lost(request.name)
    return kinds


def _captured(request: Request, arguments: Arguments, placed: Placed) -> list[Kind]:
    everyone = all_coordinates(placed.axes)
    number = {c: r for r, c in enumerate(everyone)}
    mine = placed.coordinate
    left = [mine, *(c for c in everyone if c != mine)]
    kinds = []
    while left:
        first = left[0]
        given = _as_of_rank(request, arguments, number[first])
        kind = _capture_of(_asking(request, rank=first), given, placed)
        layouts = _layouts_of(request, number[first])
        fitting = [
            c
            for c in left
            if _layouts_of(request, number[c]) == layouts
            and uneven_shards.fits(kind.captured.cuts, placed.axes.names, c)
        ]
        kinds.append(attrs.evolve(kind, ranks=tuple(fitting)))
        left = [c for c in left if c not in fitting]
    return kinds


def _capture_of(request: Request, arguments: Arguments, placed: Placed) -> Kind:
    """Capture per-rank code for the local arguments of one rank."""
    if request.layouts:
        placed = place(request, arguments)
    return Kind((), placed, captured_for(request, arguments, placed))


def _layouts_of(request: Request, rank: int) -> list[Any]:
    """Return the local shapes and strides of one rank's arguments, where ranks differ."""
    return [every and every[rank] for every in request.layouts]


def _as_of_rank(request: Request, arguments: Arguments, rank: int) -> Arguments:
    """Give the arguments the local sizes of another rank."""
    if not request.layouts:
        return arguments
    tree = arguments.args, arguments.kwargs
    rows = zip(_tree.quick_leaves(tree), request.layouts, strict=True)
    leaves = [x if every is None else _like(x, *every[rank]) for x, every in rows]
    args, kwargs = _tree.refill(tree, leaves)
    flat = _tree.leaves((args, kwargs))
    return attrs.evolve(arguments, args=args, kwargs=kwargs, leaves=flat)


def _like(x: Any, shape: Any, stride: Any) -> Any:
    """Make a DTensor of per-rank local tensors with another local shape."""
    spec = _compat.spec_of(x)
    whole = (x.shape[0], *shape)
    strides = (max(math.prod(shape), 1), *stride)
    made = _compat.dtensor_spec(spec.mesh, spec.placements, whole, strides, x.dtype)
    return _compat.dtensors([_compat.local_tensor(x)], [made], kind=type(x))[0]


def _asking(request: Request, **changes: Any) -> Request:
    """Copy a Request with other fields, once."""
    key = tuple(changes.items())
    known = request.store.followed
    if key not in known:
        known[key] = attrs.evolve(request, **changes)
    return known[key]


def _refuse_other_results(name: str, a: Captured, b: Captured) -> None:
    """Refuse results of another structure on each rank."""
    rows = [(x.program.out_tree, [leaf is TENSOR for leaf in x.program.out_leaves]) for x in (a, b)]
    if rows[0] != rows[1]:
        got = "ranks with shards of different sizes return different trees"
        fix = "return the same tree of tensors for every size"
        raise TreeError.of(name, got, fix=fix, source=call_site())
    if a.outside.draws != b.outside.draws or not _is_same(a, b):
        got = (
            "ranks with shards of different sizes read different closed-over tensors, or draw "
            "different random numbers"
        )
        fix = "use the same closed-over tensors and random calls for every size"
        raise TreeError.of(name, got, fix=fix, source=call_site())


def _is_same(a: Captured, b: Captured) -> bool:
    """Return whether two captures close over the same tensors."""
    return [*map(id, a.outside.shared)] == [*map(id, b.outside.shared)]
