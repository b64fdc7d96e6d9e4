"""The cheapest way from one placement to another, as steps on one mesh axis each.

Two axes that shard the same dim are a stack: only the inner one can be gathered, and a new one
goes innermost. Axes that view the dim as different numbers of blocks are stacks of their own.
Under that rule Dijkstra's algorithm over placements finds the steps.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterator, Sequence

import attrs

from ..collectives import (
    ALL_GATHER,
    ALL_TO_ALL,
    COLLECTIVES,
    HALO,
    PARTIAL,
    REPLICATED,
    SHARDED,
    SHARDED_WITH_HALO,
    STEPS,
    CollectiveKind,
)
from ..types import PENDING, Cost, Mark, Marks, MeshAxes
from . import layout

EVEN = Cost()
SLICE = "slice"  # the step that sends nothing
SLICE_FACTOR = 0.01  # but copies


@attrs.frozen
class Move:
    """One step of a redistribution, on one mesh axis.

    `kind` is the name of a collective, or a slice. A ppermute changes no placement.
    """

    kind: str
    axis: int
    before: Marks
    after: Marks
    perm: tuple[tuple[int, int], ...] = ()  # of a ppermute: who sends to whom

    @property
    def sends(self) -> bool:
        """Whether it communicates."""
        return self.kind in COLLECTIVES

    @property
    def collective(self) -> CollectiveKind:
        """The kind of collective that carries it out; a slice has none."""
        return COLLECTIVES[self.kind]


def price(kind: str, nbytes: float, n: int, cost: Cost = EVEN) -> float:
    """The price of a step for a rank; `nbytes` counts the value replicated on that axis, or a
    halo.
    """
    if n == 1:
        return 0.0
    if kind == SLICE:
        return SLICE_FACTOR / n * nbytes
    return COLLECTIVES[kind].share(n) * nbytes * cost.byte + cost.start


def _lies(mark: Mark) -> str:
    """How a value lies on an axis."""
    if isinstance(mark, str):
        return PARTIAL if mark in PENDING else REPLICATED
    return SHARDED_WITH_HALO if any(layout.halo(mark)) else SHARDED


def kind_of(src: Mark, dst: Mark) -> str | None:
    """The step from one mark to another on one axis, None where there is none."""
    step = _lies(src), _lies(dst)
    if src == dst or (step == (SHARDED, SHARDED_WITH_HALO) and src != layout.without_halo(dst)):
        return None
    return SLICE if step == (REPLICATED, SHARDED) else STEPS.get(step)


def mark_price(
    src: Mark, dst: Mark, nbytes: float, n: int, shape: Sequence[int], cost: Cost = EVEN
) -> float:
    """The price of one axis alone: an estimate that ignores how axes stack. An axis of one rank
    counts as one of two, so that values are placed as on the mesh that it stands for.
    """
    n = max(n, 2)
    if src == dst:
        return 0.0
    if any(layout.halo(src)):
        return float("inf")
    if any(layout.halo(dst)):
        plain = mark_price(src, layout.without_halo(dst), nbytes, n, shape, cost)
        return plain + price(HALO, nbytes * layout.halo_share(shape, dst), n, cost)
    if (
        not isinstance(src, str)
        and not isinstance(dst, str)
        and layout.cut_of(src)[0] == layout.cut_of(dst)[0]
    ):
        return price(ALL_GATHER, nbytes, n, cost) + price(SLICE, nbytes, n, cost)
    kind = kind_of(src, dst)
    if kind is None:
        return float("inf")
    priced_as = COLLECTIVES[kind].priced_as if kind in COLLECTIVES else None
    if priced_as is None:
        return price(kind, nbytes, n, cost)
    return price(priced_as, nbytes, n, cost) + cost.start


def local_bytes(nbytes: float, marks: Sequence[Mark], sizes: Sequence[int], without: int) -> float:
    """The bytes of a rank's local tensor if the axis `without` did not shard it."""
    for k, (mark, n) in enumerate(zip(marks, sizes, strict=True)):
        if k != without and not isinstance(mark, str):
            nbytes /= n
    return nbytes


def route(
    shape: tuple[int, ...],
    itemsize: int,
    src: Marks,
    dst: Marks,
    axes: MeshAxes,
    later: tuple[int, ...] = (),
) -> tuple[float, tuple[Move, ...]] | None:
    """The cheapest moves from `src` to `dst`, with their price in bytes; None where there are
    none. `later` has the sizes of axes whose placements are still open.
    """
    return _route(shape, itemsize, src, dst, axes, axes.costs, later)


@functools.lru_cache(maxsize=4096)
def _route(
    shape: tuple[int, ...],
    itemsize: int,
    src: Marks,
    dst: Marks,
    axes: MeshAxes,
    costs: tuple[Cost, ...],
    later: tuple[int, ...],
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
        for move in _moves(shape, marks, dst, axes, later):
            share = layout.halo_share(shape, move.after[move.axis]) if move.kind == HALO else 1.0
            step = price(
                move.kind,
                share * local_bytes(nbytes, marks, axes.sizes, move.axis),
                axes.sizes[move.axis],
                axes.cost(move.axis),
            )
            heapq.heappush(queue, (cost + step, next(ticket), move.after, (*moves, move)))
    return None


def _moves(
    shape: tuple[int, ...], marks: Marks, dst: Marks, axes: MeshAxes, later: tuple[int, ...]
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
                kind == ALL_TO_ALL and layout.cut_of(mark)[0] == layout.cut_of(wanted)[0]
            ):
                continue
            after = (*marks[:k], wanted, *marks[k + 1 :])
            if _innermost(after, k, wanted) and _fits(shape, after, axes, later):
                yield Move(kind, k, marks, after)


def _innermost(marks: Marks, k: int, mark: Mark) -> bool:
    """Whether no later axis shards a chunk of this axis."""
    cut = layout.split(mark)
    return cut is None or all(
        layout.split(m) is None
        or layout.cut_of(m)[0] != cut[0]
        or layout.outer_of(m) != layout.outer_of(mark)
        for m in marks[k + 1 :]
    )


def _fits(shape: tuple[int, ...], marks: Marks, axes: MeshAxes, later: tuple[int, ...]) -> bool:
    return layout.canonical(shape, marks, axes.sizes, later) == marks
