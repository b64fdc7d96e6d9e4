"""Assign transfers to buckets, which are filled in the order in which gradients become ready.

Two rules keep it correct. A bucket has one mesh axis, dtype and reduction. And no member of a
bucket depends on another member, not even through other buckets. The reduction of the loss
shares the next bucket that is filled. Small reductions whose results one op reads are one
collective. Of gradients that become ready together, such as those of a layer's weight and bias,
the one with fewer dims comes first, as in autograd. So a bucket that closes with a weight also
has its bias. A bucket lists its leaves as they are computed.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from ...buckets import Row, Wish
from ...collectives import ALL_GATHER, ALL_REDUCE
from ...errors import TreeError
from ..flow import Flow, Transfer
from .batches import SAME_PROGRAM, Batch, follow, reaches, sort_leaves
from .small_reductions import common_readers, riders

FEW = 8
UNBOUNDED = sys.maxsize  # of the bytes of a batch of small reductions


@attrs.frozen(eq=False)
class Assignment:
    """The batches, and the positions of steps that follow from them."""

    batches: tuple[Batch, ...]
    of: dict[Any, Batch]  # by the transfer's key
    anchors: tuple[
        int, ...
        # for each step: the step after which it can run; its own index, or an earlier one if it
        # only feeds a reduction
    ]
    order: tuple[int, ...]  # the steps, by anchor
    after: dict[
        int, int
        # batch -> the batch that starts before it, if a given plan has another order than the
        # program
    ]

    @property
    def transfers(self) -> Iterator[Transfer]:
        """The transfers."""
        return (t for b in self.batches for t in b.members)


def assign(flow: Flow, name: str) -> Assignment:
    """Put every transfer of a plan into a batch.

    Raises:
        TreeError: a bucket of a given plan that cannot be one collective.
    """
    ride = riders(flow)
    serves = _serving(flow, ride)
    anchors = _anchors(flow, serves)
    order = _ordered(flow, serves, anchors)
    joiner = _Joiner(name, common_readers(flow))
    depends = [0] * len(anchors)
    for i in order:
        bits = 0
        for source in flow.sources(i):
            bits |= depends[source]
        for transfer in flow.transfers.get(i, ()):
            if transfer.key in ride and not bits & joiner.reductions:
                joiner.waiting.append((transfer, bits))
            else:
                bits |= 1 << joiner.join(transfer, bits).index
        depends[i] = bits
    for transfer, bits in joiner.waiting:
        joiner.join(transfer, bits)
    for batch in joiner.batches:
        if batch.bucketed and batch.wanted is None:
            sort_leaves(batch, lambda t: (anchors[t.step], t.step))  # as they are computed
    batches, after = follow(joiner.batches, joiner.places, name)
    return Assignment(batches, joiner.of, tuple(anchors), order, after)


def _serving(flow: Flow, ride: frozenset[Any]) -> list[int | None]:
    """For each step: the one reduction that its results are for, directly or through other
    steps. None for most steps.
    """
    serves: list[int | None] = [None] * len(flow.plan.steps)
    for i in reversed(range(len(serves))):
        if i in flow.transfers:
            t = flow.transfers[i][0]
            serves[i] = (
                i if (t.wish is not None and t.kind != ALL_GATHER) or t.key in ride else None
            )
        elif i not in flow.returned:
            served = {serves[r] for r in flow.readers[i]}
            serves[i] = served.pop() if len(served) == 1 else None
    return serves


def _anchors(flow: Flow, serves: Sequence[int | None]) -> list[int]:
    """Where each step can run. A step that only feeds a reduction runs as soon as its inputs
    are available.
    """
    first = _first_steps(flow)
    anchors: list[int] = []
    for i, served in enumerate(serves):
        sources = flow.sources(i)
        early = served is not None and sources and not any(s in flow.transfers for s in sources)
        anchors.append(-1 if i in first else max(anchors[s] for s in sources) if early else i)
    return anchors


def _ordered(flow: Flow, serves: Sequence[int | None], anchors: Sequence[int]) -> tuple[int, ...]:
    """The steps, by anchor."""
    ranks = [_rank(flow, serves[i]) if anchor < i else 0 for i, anchor in enumerate(anchors)]
    ready = _ready(flow)
    key = lambda i: (anchors[i], ranks[i], ready[i], i)
    return tuple(sorted(range(len(anchors)), key=key))


def _ready(flow: Flow) -> list[int]:
    """The step after which each step can run, among those of one anchor. Reductions stand in
    the order of the results, so each counts from the step that computes its value.
    """
    ready: list[int] = []
    for i in range(len(flow.plan.steps)):
        sources = flow.sources(i) if i in flow.transfers else []
        ready.append(max((ready[s] for s in sources), default=i))
    return ready


def _rank(flow: Flow, served: int | None) -> int:
    """The rank of steps that can run at the same time: steps for a gradient of fewer dims come
    first.
    """
    if served is None:
        return 0
    (made,) = flow.plan.steps[served].made
    return 1 + made.value.dim()


def _first_steps(flow: Flow) -> set[int]:
    """Short chains of steps from inputs to a sum that other steps need, such as the number of
    valid tokens. They come first.
    """
    found: set[int] = set()
    for i, sent in flow.transfers.items():
        if sent[0].wish is not None or sent[0].kind != ALL_REDUCE:
            continue
        cone = {i}
        queue = flow.sources(i)
        while queue and len(cone) <= FEW:
            step = queue.pop()
            if step not in cone:
                cone.add(step)
                queue += flow.sources(step)
        if (
            not queue
            and len(cone) <= FEW
            and not any(step in flow.transfers for step in cone - {i})
        ):
            found |= cone
    return found


class _Joiner:
    """The batches so far, and the open batch of each stream."""

    def __init__(self, name: str, readers: dict[Any, int]) -> None:
        self.name = name
        self.readers = readers  # of small reductions, by key
        self.batches: list[Batch] = []
        self.of: dict[Any, Batch] = {}
        self.open: dict[Any, Batch] = {}
        self.started: set[Any] = set()
        self.turns: collections.Counter[Any] = (
            collections.Counter()
        )  # how often each leaf was sent so far
        self.chained = 0  # bits: the batches that depend on others
        self.reductions = 0  # bits: the batches that reduce gradients
        self.places: dict[Any, int] = {}  # the position of a transfer in its bucket of a given plan
        self.waiting: list[
            tuple[Transfer, int]
        ] = []  # small reductions that may share a bucket, with the batches that they depend on

    def join(self, transfer: Transfer, depends: int) -> Batch:
        """The batch of a transfer."""
        if transfer.key in self.of:
            return self.of[transfer.key]
        stream, limit = self.stream(transfer)
        batch = self.open.get(stream)
        if batch is not None and self.reaches(depends, batch):
            if isinstance(stream, _Wanted):
                raise _dependent(self.name, transfer, batch)
            batch = None
        if batch is None:
            number = stream.bucket if isinstance(stream, _Wanted) else None
            batch = Batch(len(self.batches), cap=limit, wanted=number)
            self.batches.append(batch)
            if stream is not None:
                self.open[stream] = batch
        elif isinstance(stream, _Wanted):
            _refuse_mixed(self.name, transfer, batch)
        batch.nbytes += transfer.nbytes
        self.take(batch, transfer, depends)
        if transfer.wish is not None and batch.reduces:
            self.reductions |= 1 << batch.index
        if batch.bucketed:
            self.board(batch)
        if batch.nbytes >= limit and stream in self.open and not isinstance(stream, _Wanted):
            del self.open[stream]
            self.started.add(stream)
        return batch

    def take(self, batch: Batch, transfer: Transfer, depends: int) -> None:
        """Put a transfer into a batch."""
        batch.members.append(transfer)
        batch.depends |= depends
        self.chained |= (1 << batch.index) if batch.depends else 0
        self.of[transfer.key] = batch

    def board(self, batch: Batch) -> None:
        """Add waiting small reductions to this bucket, if one collective can carry them."""
        served = [
            w
            for w in self.waiting
            if _alike(w[0], batch.members[0]) and not self.reaches(w[1], batch)
        ]
        self.waiting = [w for w in self.waiting if w not in served]
        for transfer, depends in served:
            self.take(batch, transfer, depends)
            batch.riding += transfer.nbytes

    def stream(self, t: Transfer) -> tuple[Any, int]:
        """The stream of a transfer, and the bytes at which its bucket closes. Transfers of one
        stream may share a bucket.
        """
        if t.wish is None and t.key in self.readers:
            return (self.readers[t.key], t.axis, t.op, t.dtype, t.phase), UNBOUNDED
        if t.wish is None or t.wish.ignored:
            return None, 0
        if t.wish.rows is not None:
            row = self.wanted(t, t.wish)
            return _Wanted(t.region, row.bucket), row.cap
        key = (t.region, t.kind, t.axis, t.op, t.dtype, t.phase if t.kind == ALL_GATHER else "")
        return key, t.wish.cap if key in self.started else t.wish.first_cap

    def wanted(self, t: Transfer, wish: Wish) -> Row:
        """The row of a given plan for a transfer. A leaf that is sent several times takes its
        rows in order.
        """
        assert wish.rows is not None
        what = (t.kind, t.axis, t.phase)
        rows = [row for row in wish.rows if row.what == what]
        turn = self.turns[t.region, wish.leaf, what]
        self.turns[t.region, wish.leaf, what] += 1
        if turn < len(rows):
            row = rows[turn]
            got = _contradicted(t, wish.leaf, row)
            if got is None:
                self.places[t.key] = row.place
                return row
        else:
            more = f"{len(rows)} of it" if rows else "no bucket for it"
            got = (
                f"{wish.leaf} has an {t.kind} over {t.axis} in the {t.phase}, and the plan "
                f"has {more}"
            )
        raise TreeError.of(f"{self.name}, plan", got, fix=SAME_PROGRAM, arg_path=wish.leaf)

    def reaches(self, depends: int, target: Batch) -> bool:
        return reaches(self.batches, self.chained, depends, target)


def _contradicted(t: Transfer, leaf: str, row: Row) -> str | None:
    """How a transfer of a leaf differs from its row in a given plan."""
    dtype = str(t.dtype).removeprefix("torch.")
    if (row.dtype, row.nbytes) != (dtype, t.nbytes):
        return (
            f"{leaf} sends {t.nbytes} bytes of {t.dtype}, in the plan "
            f"{row.nbytes} of torch.{row.dtype}"
        )
    if row.op != t.op:
        return f"the {t.kind} of {leaf} is by {t.op}, in the plan by {row.op}"
    return None


def _alike(a: Transfer, b: Transfer) -> bool:
    return (a.kind, a.axis, a.op, a.dtype) == (b.kind, b.axis, b.op, b.dtype)


@attrs.frozen
class _Wanted:
    """The stream of a bucket of a given plan."""

    region: str
    bucket: int


def _dependent(name: str, transfer: Transfer, batch: Batch) -> TreeError:
    first = batch.members[0].wish
    leaf = transfer.wish
    assert first is not None and leaf is not None
    fix = "separate buckets for them"
    got = f"{leaf.leaf} shares a bucket with {first.leaf}, on which it depends"
    return TreeError.of(
        f"{name}, plan",
        got,
        needed="buckets of independent reductions",
        fix=fix,
        arg_path=leaf.leaf,
    )


def _refuse_mixed(name: str, transfer: Transfer, batch: Batch) -> None:
    """Refuse a bucket of a given plan whose transfers cannot be one collective."""
    first = batch.members[0]
    wrong = [
        f"{what} {a} and {b}"
        for what, a, b in (
            ("kind", first.kind, transfer.kind),
            ("axis", first.axis, transfer.axis),
            ("dtype", first.dtype, transfer.dtype),
            ("reduction", first.op, transfer.op),
            ("phase", first.phase, transfer.phase),
        )
        if a != b
    ]
    if wrong:
        assert transfer.wish is not None and first.wish is not None
        fix = "one bucket for each axis, dtype, reduction and phase"
        got = f"{transfer.wish.leaf} and {first.wish.leaf} share a bucket"
        raise TreeError.of(f"{name}, plan", got, *wrong, fix=fix, arg_path=transfer.wish.leaf)
