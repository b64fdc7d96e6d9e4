"""The cheapest way from one placement to another, as steps on one mesh axis each.

Two axes that shard the same dim are a stack: only the inner one can be gathered, and a new one
goes innermost. Axes that view the dim as different numbers of blocks are stacks of their own.
Under that rule Dijkstra's algorithm over placements finds the steps.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence

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
from ..types import PARTIAL_KINDS, AxisPlacement, Cost, MeshAxes, MeshPlacements
from . import layout

EVEN = Cost()
SLICE = "slice"  # the step that sends nothing
SLICE_FACTOR = 0.01  # but copies


@attrs.frozen
class Move:
    """One step of a redistribution, on one mesh axis: a collective or a slice.

    `kind` is the name of a collective, or a slice. A ppermute changes no placement.
    """

    kind: str
    axis: int
    before: MeshPlacements
    after: MeshPlacements
    perm: tuple[tuple[int, int], ...] = ()  # of a ppermute: who sends to whom
    # of a ragged all-to-all: the dim of the rows, and how many the result has
    rows: tuple[int, int] | None = None

    @property
    def sends(self) -> bool:
        """Whether the step communicates."""
        return self.kind in COLLECTIVES

    @property
    def collective(self) -> CollectiveKind:
        """The row of the collective that carries out the step."""
        return COLLECTIVES[self.kind]


def price(kind: str, nbytes: float, n: int, cost: Cost = EVEN) -> float:
    """Price one step of a redistribution for a rank."""
    if n == 1:
        return 0.0
    if kind == SLICE:
        return SLICE_FACTOR / n * nbytes
    return COLLECTIVES[kind].share(n) * nbytes * cost.byte + cost.start


def _lies(placement: AxisPlacement) -> str:
    """Return how a value lies on an axis: replicated, sharded, sharded with a halo, or Partial."""
    if isinstance(placement, str):
        return PARTIAL if placement in PARTIAL_KINDS else REPLICATED
    return SHARDED_WITH_HALO if any(layout.halo(placement)) else SHARDED


def kind_of(src: AxisPlacement, dst: AxisPlacement) -> str | None:
    """Return the kind of step between two placements on one axis; None where there is none."""
    step = _lies(src), _lies(dst)
    if src == dst or (step == (SHARDED, SHARDED_WITH_HALO) and src != layout.without_halo(dst)):
        return None
    return SLICE if step == (REPLICATED, SHARDED) else STEPS.get(step)


def axis_price(
    src: AxisPlacement,
    dst: AxisPlacement,
    nbytes: float,
    n: int,
    shape: Sequence[int],
    cost: Cost = EVEN,
) -> float:
    """Estimate the price of a redistribution on one axis, ignoring how axes share a dim."""
    n = max(n, 2)
    if src == dst:
        return 0.0
    if any(layout.halo(src)):
        return float("inf")
    if any(layout.halo(dst)):
        plain = axis_price(src, layout.without_halo(dst), nbytes, n, shape, cost)
        return plain + price(HALO, nbytes * layout.halo_share(shape, dst), n, cost)
    if (
        not isinstance(src, str)
        and not isinstance(dst, str)
        and layout.dim_and_unit(src)[0] == layout.dim_and_unit(dst)[0]
    ):
        through_all = price(ALL_GATHER, nbytes, n, cost) + price(SLICE, nbytes, n, cost)
        if not _between(shape, src, dst, n):
            return through_all
        return min(through_all, 2 * price(ALL_TO_ALL, nbytes, n, cost))
    kind = kind_of(src, dst)
    if kind is None:
        return float("inf")
    priced_as = COLLECTIVES[kind].priced_as if kind in COLLECTIVES else None
    if priced_as is None:
        return price(kind, nbytes, n, cost)
    return price(priced_as, nbytes, n, cost) + cost.start


def local_bytes(
    nbytes: float, placements: Sequence[AxisPlacement], sizes: Sequence[int], without: int
) -> float:
    """Return the bytes of a rank's local tensor if one axis did not shard it."""
    for k, (placement, n) in enumerate(zip(placements, sizes, strict=True)):
        if k != without and not isinstance(placement, str):
            nbytes /= n
    return nbytes


def route(
    shape: tuple[int, ...],
    itemsize: int,
    src: MeshPlacements,
    dst: MeshPlacements,
    axes: MeshAxes,
    later: tuple[int, ...] = (),
) -> tuple[float, tuple[Move, ...]] | None:
    """Find the cheapest moves between two placements, with their price; None if there are none."""
    return _route(shape, itemsize, src, dst, axes, axes.costs, later)


@functools.lru_cache(maxsize=4096)
def _route(
    shape: tuple[int, ...],
    itemsize: int,
    src: MeshPlacements,
    dst: MeshPlacements,
    axes: MeshAxes,
    costs: tuple[Cost, ...],
    later: tuple[int, ...],
) -> tuple[float, tuple[Move, ...]] | None:
    """Run Dijkstra's algorithm over placements."""
    nbytes = float(itemsize)
    for n in shape:
        nbytes *= n
    queue: list[tuple[float, int, MeshPlacements, tuple[Move, ...]]] = [(0.0, 0, src, ())]
    seen: set[MeshPlacements] = set()
    ticket = itertools.count(1)
    while queue:
        cost, _, placements, moves = heapq.heappop(queue)
        if placements == dst:
            return cost, moves
        if placements in seen:
            continue
        seen.add(placements)
        for move in _moves(shape, placements, dst, axes, later):
            share = layout.halo_share(shape, move.after[move.axis]) if move.kind == HALO else 1.0
            step = price(
                move.kind,
                share * local_bytes(nbytes, placements, axes.sizes, move.axis),
                axes.sizes[move.axis],
                axes.cost(move.axis),
            )
            heapq.heappush(queue, (cost + step, next(ticket), move.after, (*moves, move)))
    return None


def _moves(
    shape: tuple[int, ...],
    placements: MeshPlacements,
    dst: MeshPlacements,
    axes: MeshAxes,
    later: tuple[int, ...],
) -> Iterator[Move]:
    """Yield the moves from some placements that lead toward the target."""
    for k, placement in enumerate(placements):
        if not _innermost(placements, k, placement):
            continue
        for wanted in _toward(shape, placement, dst[k], axes.sizes[k]):
            kind = kind_of(placement, wanted)
            if kind is None or (
                kind == ALL_TO_ALL
                and layout.dim_and_unit(placement)[0] == layout.dim_and_unit(wanted)[0]
            ):
                continue
            after = (*placements[:k], wanted, *placements[k + 1 :])
            if _innermost(after, k, wanted) and _fits(shape, after, axes, later):
                yield Move(kind, k, placements, after)


def _toward(
    shape: tuple[int, ...], placement: AxisPlacement, dst: AxisPlacement, n: int
) -> Iterable[AxisPlacement]:
    """List the placements on one axis that may lead toward its target."""
    if dst == "R" or dst in PARTIAL_KINDS:
        return ("R",)
    plain = layout.without_halo(dst)
    return dict.fromkeys(("R", plain, dst, *_between(shape, placement, plain, n)))


def _between(
    shape: Sequence[int], placement: AxisPlacement, dst: AxisPlacement, n: int
) -> list[AxisPlacement]:
    """List the dims over which two all-to-alls lead from a zigzag to other chunks of its dim, or
    back. Each sends a shard, where a gather sends all of them.
    """
    cuts = layout.split(placement), layout.split(dst)
    if None in cuts or layout.is_zigzag(placement) == layout.is_zigzag(dst):
        return []
    dims = {layout.dim_and_unit(placement)[0], layout.dim_and_unit(dst)[0]}
    others = [d for d, size in enumerate(shape) if d not in dims and size and size % n == 0]
    return [*others] if len(dims) == 1 else []


def _innermost(placements: MeshPlacements, k: int, placement: AxisPlacement) -> bool:
    """Return whether no later axis shards a chunk of this axis."""
    cut = layout.split(placement)
    return cut is None or all(
        layout.split(m) is None
        or layout.dim_and_unit(m)[0] != cut[0]
        or layout.block_count(m) != layout.block_count(placement)
        for m in placements[k + 1 :]
    )


def _fits(
    shape: tuple[int, ...], placements: MeshPlacements, axes: MeshAxes, later: tuple[int, ...]
) -> bool:
    """Return whether placements are in their simplest form for a shape."""
    return layout.canonical(shape, placements, axes.sizes, later) == placements
