"""Assign transfers to buckets, which are filled in the order in which gradients become ready.

Two rules keep it correct. A bucket has one mesh axis, dtype and reduction. And no member of a
bucket depends on another member, not even through other buckets. The reduction of the loss
shares the next bucket that is filled. Small reductions whose results one op reads are one
collective. A gradient that is reduced over one axis after another enters its second bucket when
the first one is full, so that the second need not wait for a bucket that fills slowly. Of
gradients that become ready together, such as those of a layer's weight and bias, the one with
fewer dims comes first, as in autograd. So a bucket that closes with a weight also has its bias. A
bucket lists its leaves as they are computed.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from ...buckets import BucketOptions, Row
from ...collectives import ALL_GATHER, ALL_REDUCE
from ...errors import TreeError
from ..data_flow import Flow, Transfer
from .batches import SAME_PROGRAM, Batch, follow, reaches, sort_leaves
from .small_reductions import common_readers, fusable_reductions

FEW = 8
UNBOUNDED = sys.maxsize  # of the bytes of a batch of small reductions


@attrs.frozen(eq=False)
class Assignment:
    """The batches of transfers, and the order of steps that follows from them."""

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
        """Yield all transfers."""
        return (t for b in self.batches for t in b.members)


def assign(flow: Flow, name: str) -> Assignment:
    """Assign every transfer of a plan to a batch: gradient reductions to buckets, in the order
    in which they are ready.

    Raises:
        TreeError: a bucket of a given plan that cannot be one collective.
    """
    fusable = fusable_reductions(flow)
    serves = _serving(flow, fusable)
    anchors = _anchors(flow, serves)
    order = _ordered(flow, serves, anchors)
    joiner = _Joiner(name, common_readers(flow))
    depends = [0] * len(anchors)
    late: dict[int, None] = {}  # steps that come after an open bucket

    def is_joined(i: int) -> bool:
        """Join the transfers of a step, unless it comes after a bucket that is still filled."""
        sources = flow.sources(i)
        if any(source in late for source in sources):
            return False
        bits = 0
        for source in sources:
            bits |= depends[source]
        for transfer in flow.transfers.get(i, ()):
            if transfer.key in fusable and not bits & joiner.reductions:
                joiner.waiting.append((transfer, bits))
            elif joiner.comes_later(transfer, bits):
                return False
            else:
                bits |= 1 << joiner.join(transfer, bits).index
        depends[i] = bits
        return True

    def join_late() -> None:
        for i in [*late]:
            del late[i]
            if not is_joined(i):
                late[i] = None

    for i in order:
        closed = joiner.closed
        if not is_joined(i):
            late[i] = None
        if joiner.closed != closed:
            join_late()
    joiner.is_filled = True
    join_late()
    for transfer, bits in joiner.waiting:
        joiner.join(transfer, bits)
    for batch in joiner.batches:
        if batch.bucketed and batch.wanted is None:
            sort_leaves(batch, lambda t: (anchors[t.step], t.step))  # as they are computed
    batches, after = follow(joiner.batches, joiner.places, name)
    return Assignment(batches, joiner.of, tuple(anchors), order, after)


def _serving(flow: Flow, fusable: frozenset[Any]) -> list[int | None]:
    """For each step, find the one reduction that it computes for; None for most steps."""
    serves: list[int | None] = [None] * len(flow.plan.steps)
    for i in reversed(range(len(serves))):
        if i in flow.transfers:
            t = flow.transfers[i][0]
            serves[i] = (
                i if (t.options is not None and t.kind != ALL_GATHER) or t.key in fusable else None
            )
        elif i not in flow.returned:
            served = {serves[r] for r in flow.readers[i]}
            serves[i] = served.pop() if len(served) == 1 else None
    return serves


def _anchors(flow: Flow, serves: Sequence[int | None]) -> list[int]:
    """For each step, find the step after which it can run; payloads of reductions run early."""
    first = _first_steps(flow)
    anchors: list[int] = []
    for i, served in enumerate(serves):
        sources = flow.sources(i)
        early = served is not None and sources and not any(s in flow.transfers for s in sources)
        anchors.append(-1 if i in first else max(anchors[s] for s in sources) if early else i)
    return anchors


def _ordered(flow: Flow, serves: Sequence[int | None], anchors: Sequence[int]) -> tuple[int, ...]:
    """Sort the steps by when they can run."""
    ranks = [_rank(flow, serves[i]) if anchor < i else 0 for i, anchor in enumerate(anchors)]
    ready = _ready(flow)
    key = lambda i: (anchors[i], ranks[i], ready[i], i)
    return tuple(sorted(range(len(anchors)), key=key))


def _ready(flow: Flow) -> list[int]:
    """For each step, find the step after which it is ready, among steps that run at the same
    time.
    """
    ready: list[int] = []
    for i in range(len(flow.plan.steps)):
        sources = flow.sources(i) if i in flow.transfers else []
        ready.append(max((ready[s] for s in sources), default=i))
    return ready


def _rank(flow: Flow, served: int | None) -> int:
    """Rank steps that are ready at the same time: gradients of fewer dims first, so that biases
    join their weights.
    """
    if served is None:
        return 0
    (made,) = flow.plan.steps[served].made
    return 1 + made.value.dim()


def _first_steps(flow: Flow) -> set[int]:
    """Find short chains of steps that feed an early all-reduce, such as the count of valid
    tokens.
    """
    found: set[int] = set()
    for i, sent in flow.transfers.items():
        if sent[0].options is not None or sent[0].kind != ALL_REDUCE:
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
    """Fills buckets with transfers: the batches so far, and the open batch of each stream."""

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
        self.closed = 0  # how many buckets are full
        self.is_filled = False  # whether no gradient is left that becomes ready
        self.places: dict[Any, int] = {}  # the position of a transfer in its bucket of a given plan
        self.waiting: list[
            tuple[Transfer, int]
        ] = []  # small reductions that may share a bucket, with the batches that they depend on

    def join(self, transfer: Transfer, depends: int) -> Batch:
        """Put a transfer into the open batch of its stream, or into a new one."""
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
        if transfer.options is not None and batch.reduces:
            self.reductions |= 1 << batch.index
        if batch.bucketed:
            self.add_waiting(batch)
        if batch.nbytes >= limit and stream in self.open and not isinstance(stream, _Wanted):
            del self.open[stream]
            self.started.add(stream)
            self.closed += 1
        return batch

    def comes_later(self, transfer: Transfer, depends: int) -> bool:
        """Return whether a gradient that is reduced over another axis first has to wait until that
        bucket is full. Its bucket here would otherwise wait for all of the other one.
        """
        options = transfer.options
        if self.is_filled or options is None or options.ignored or options.rows is not None:
            return False
        return transfer.reduces and any(
            depends >> x.index & 1 for x in self.open.values() if x.bucketed and x.reduces
        )

    def take(self, batch: Batch, transfer: Transfer, depends: int) -> None:
        """Add a transfer to a batch."""
        batch.members.append(transfer)
        batch.depends |= depends
        self.chained |= (1 << batch.index) if batch.depends else 0
        self.of[transfer.key] = batch

    def add_waiting(self, batch: Batch) -> None:
        """Add waiting small reductions to a bucket that can carry them."""
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
        """Return which transfers may share a bucket with this one, and the cap at which the
        bucket closes.
        """
        if t.options is None and t.key in self.readers:
            what = (t.axis, t.op, t.dtype, t.phase, t.coordinate)
            return (self.readers[t.key], *what), UNBOUNDED
        if t.options is None or t.options.ignored:
            return None, 0
        if t.options.rows is not None:
            row = self.wanted(t, t.options)
            return _Wanted(t.region, row.bucket), row.cap
        phase = t.phase if t.kind == ALL_GATHER else ""
        key = (t.region, t.kind, t.axis, t.op, t.dtype, phase, t.coordinate)
        return key, t.options.cap if key in self.started else t.options.first_cap

    def wanted(self, t: Transfer, options: BucketOptions) -> Row:
        """Return the row of the user's bucket plan for a transfer."""
        assert options.rows is not None
        what = (t.kind, t.axis, t.phase)
        rows = [row for row in options.rows if row.what == what]
        turn = self.turns[t.region, options.leaf, what]
        self.turns[t.region, options.leaf, what] += 1
        if turn < len(rows):
            row = rows[turn]
            got = _contradicted(t, options.leaf, row)
            if got is None:
                self.places[t.key] = row.place
                return row
        else:
            more = f"{len(rows)} of it" if rows else "no bucket for it"
            got = (
                f"{options.leaf} has an {t.kind} over {t.axis} in the {t.phase}, but the plan "
                f"has {more}"
            )
        raise TreeError.of(f"{self.name}, plan", got, fix=SAME_PROGRAM, arg_path=options.leaf)

    def reaches(self, depends: int, target: Batch) -> bool:
        """Return whether some batches depend on a target batch."""
        return reaches(self.batches, self.chained, depends, target)


def _contradicted(t: Transfer, leaf: str, row: Row) -> str | None:
    """Describe how a transfer differs from its row in the user's plan; None if it does not."""
    dtype = str(t.dtype).removeprefix("torch.")
    if (row.dtype, row.nbytes) != (dtype, t.nbytes):
        return (
            f"{leaf} sends {t.nbytes} bytes of {t.dtype}, but the plan has {row.nbytes} bytes "
            f"of torch.{row.dtype}"
        )
    if row.op != t.op:
        return f"the {t.kind} of {leaf} reduces by {t.op}, but the plan reduces by {row.op}"
    return None


def _alike(a: Transfer, b: Transfer) -> bool:
    """Return whether one collective can carry two transfers."""
    what = lambda t: (t.kind, t.axis, t.op, t.dtype, t.coordinate)
    return what(a) == what(b)


@attrs.frozen
class _Wanted:
    """The stream of a bucket of the user's plan."""

    region: str
    bucket: int


def _dependent(name: str, transfer: Transfer, batch: Batch) -> TreeError:
    """Make the error for a planned bucket whose members depend on each other."""
    first = batch.members[0].options
    leaf = transfer.options
    assert first is not None and leaf is not None
    fix = "separate buckets for them"
    got = f"{leaf.leaf} shares a bucket with {first.leaf}, but depends on its result"
    return TreeError.of(
        f"{name}, plan",
        got,
        needed="buckets of independent reductions",
        fix=fix,
        arg_path=leaf.leaf,
    )


def _refuse_mixed(name: str, transfer: Transfer, batch: Batch) -> None:
    """Raise an error for a planned bucket whose transfers cannot be one collective."""
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
        assert transfer.options is not None and first.options is not None
        fix = "use a separate bucket for each axis, dtype, reduction and phase"
        got = f"{transfer.options.leaf} and {first.options.leaf} share a bucket"
        raise TreeError.of(f"{name}, plan", got, *wrong, fix=fix, arg_path=transfer.options.leaf)
