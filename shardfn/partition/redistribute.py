"""The cheapest redistribution between two placements, as steps on one mesh axis each.

Axes that shard the same dim form a stack: only the innermost one can be gathered, and a new one
becomes innermost. Within that rule, Dijkstra's algorithm over placements finds the steps, so
there are no special cases.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterator, Sequence

import attrs

from ..collectives import MOVES
from ..types import PENDING, Cost, Mark, Marks, MeshAxes
from . import layout

EVEN = Cost()
SLICE_FACTOR = 0.01  # a slice sends nothing, but makes a copy


@attrs.frozen
class Move:
    """One step of a redistribution, on one mesh axis.

    `kind` is gather, slice, reduce, reduce_scatter, all_to_all or halo. It may also be
    ppermute, which is not a redistribution.
    """

    kind: str
    axis: int
    before: Marks
    after: Marks
    # of a ppermute: pairs (source, destination)
    perm: tuple[tuple[int, int], ...] = ()


def price(kind: str, nbytes: float, n: int, cost: Cost = EVEN) -> float:
    """The cost of a step for a rank. `nbytes` counts the value unsharded on that axis, or the
    halo.
    """
    if n == 1:
        return 0.0
    if kind == "slice":
        return SLICE_FACTOR / n * nbytes
    return MOVES[kind].share(n) * nbytes * cost.byte + cost.start


def kind_of(src: Mark, dst: Mark) -> str | None:
    """The step from one placement to another on one axis, or None."""
    if src == dst or any(
        layout.halo(src)
    ):  # no step starts from a halo: the value without it is available
        return None
    if any(layout.halo(dst)):
        return "halo" if src == layout.without_halo(dst) else None
    if src in PENDING:
        return (
            "reduce" if dst == "R" else None if dst in PENDING else "reduce_scatter"
        )
    if dst in PENDING:
        return None
    if src == "R":
        return "slice"
    if dst == "R":
        return "gather"
    return "all_to_all"


def mark_price(
    src: Mark,
    dst: Mark,
    nbytes: float,
    n: int,
    shape: Sequence[int],
    cost: Cost = EVEN,
) -> float:
    """The cost on one axis alone: an estimate that ignores stacked axes."""
    if src == dst:
        return 0.0
    if any(layout.halo(src)):
        return float("inf")
    if any(layout.halo(dst)):
        plain = mark_price(src, layout.without_halo(dst), nbytes, n, shape, cost)
        return plain + price(
            "halo", nbytes * layout.halo_share(shape, dst), n, cost
        )
    if (
        not isinstance(src, str)
        and not isinstance(dst, str)
        and layout.cut_of(src)[0] == layout.cut_of(dst)[0]
    ):
        return price("gather", nbytes, n, cost) + price("slice", nbytes, n, cost)
    kind = kind_of(src, dst)
    if kind is None:
        return float("inf")
    # the bytes that these two save are spent again if the next op needs the value unsharded
    spent = {"reduce_scatter": "reduce", "all_to_all": "gather"}
    return price(spent.get(kind, kind), nbytes, n, cost) + cost.start * (
        kind in spent
    )


def local_bytes(
    nbytes: float, marks: Sequence[Mark], sizes: Sequence[int], without: int
) -> float:
    """The bytes of a rank's local tensor if the axis `without` did not shard it."""
    for k, (mark, n) in enumerate(zip(marks, sizes, strict=True)):
        if k != without and not isinstance(mark, str):
            nbytes /= n
    return nbytes


def route(
    shape: tuple[int, ...], itemsize: int, src: Marks, dst: Marks, axes: MeshAxes
) -> tuple[float, tuple[Move, ...]] | None:
    """The cheapest moves from `src` to `dst`, with their cost in bytes, or None if there are
    none.
    """
    return _route(shape, itemsize, src, dst, axes, axes.costs)


@functools.lru_cache(maxsize=65536)
def _route(
    shape: tuple[int, ...],
    itemsize: int,
    src: Marks,
    dst: Marks,
    axes: MeshAxes,
    costs: tuple[Cost, ...],
) -> tuple[float, tuple[Move, ...]] | None:
    nbytes = float(itemsize)
    for n in shape:
        nbytes *= n
    queue: list[tuple[float, int, Marks, tuple[Move, ...]]] = [(0.0, 0, src, ())]
    seen: set[Marks] = set()
    ticket = itertools.count(1)
    while queue:
        cost, _, marks, moves = heapq.heappop(queue)
        if marks == dst:
            return cost, moves
        if marks in seen:
            continue
        seen.add(marks)
        for move in _moves(shape, marks, dst, axes):
            share = (
                layout.halo_share(shape, move.after[move.axis])
                if move.kind == "halo"
                else 1.0
            )
            step = price(
                move.kind,
                share * local_bytes(nbytes, marks, axes.sizes, move.axis),
                axes.sizes[move.axis],
                axes.cost(move.axis),
            )
            heapq.heappush(
                queue, (cost + step, next(ticket), move.after, (*moves, move))
            )
    return None


def _moves(
    shape: tuple[int, ...], marks: Marks, dst: Marks, axes: MeshAxes
) -> Iterator[Move]:
    for k, mark in enumerate(marks):
        if not _innermost(marks, k, mark):
            continue
        for wanted in (
            ("R",)
            if dst[k] == "R" or dst[k] in PENDING
            else dict.fromkeys(("R", layout.without_halo(dst[k]), dst[k]))
        ):
            kind = kind_of(mark, wanted)
            if kind is None or (
                kind == "all_to_all"
                and layout.cut_of(mark)[0] == layout.cut_of(wanted)[0]
            ):
                continue
            after = (*marks[:k], wanted, *marks[k + 1 :])
            if _innermost(after, k, wanted) and _fits(shape, after, axes):
                yield Move(kind, k, marks, after)


def _innermost(marks: Marks, k: int, mark: Mark) -> bool:
    cut = layout.split(mark)
    return cut is None or all(
        layout.split(m) is None or layout.cut_of(m)[0] != cut[0]
        for m in marks[k + 1 :]
    )


def _fits(shape: tuple[int, ...], marks: Marks, axes: MeshAxes) -> bool:
    return layout.canonical(shape, marks, axes.sizes) == marks
