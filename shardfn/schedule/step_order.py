"""The order of a program: compute as written, collectives early, waits late.

Everything is decided from the plan, so all ranks start the same collectives in the same order.
A reduction starts right after the last step that it needs. Its wait comes right before its
first reader, and readers of the first bucket come before readers of the second. So the update
of the first parameters overlaps with the reduction of the last gradients. An all-gather of
parameters starts while the parameters of the previous one are in use.
"""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Iterator

import attrs

from ..collectives import ALL_GATHER
from ..partition import plan
from .bucketing.assign_buckets import Assignment
from .bucketing.batches import Batch, reaches
from .data_flow import Flow

Item = tuple[str, int]  # ("run", step), ("start", batch) or ("wait", batch)
DEFAULT_IN_FLIGHT = 2**30


def sequence(flow: Flow, assignment: Assignment) -> tuple[tuple[int, ...], tuple[Item, ...]]:
    """Order all steps, starts and waits of collectives."""
    timing = _Timing(flow, assignment)
    items = tuple(_walk(timing, timing.starts()))
    return tuple(i for kind, i in items if kind == "start"), items


@attrs.define(eq=False)
class _Timing:
    """When each batch can start and must have ended, as positions among the computing steps."""

    flow: Flow
    assignment: Assignment
    run: list[int] = attrs.field(
        init=False
    )  # computing steps in order; the others run when they are needed
    position: dict[int, int] = attrs.field(init=False)
    ready: list[int] = attrs.field(
        init=False
    )  # for each batch: the position before which it can start
    first_use: list[int] = attrs.field(init=False)
    tails: list[int] = attrs.field(
        init=False
    )  # for each step: the last reduction bucket that it depends on, -1 for none
    forced: dict[int, list[int]] = attrs.field(
        factory=dict
    )  # batch -> batches to wait for before it starts

    def __attrs_post_init__(self) -> None:
        tails = self.tails = self.last_buckets()
        late = self.late_steps()
        computing = [
            i
            for i in self.assignment.order
            if isinstance(self.flow.plan.steps[i], plan.Apply)
            and i not in self.flow.transfers
            and not late[i]
        ]
        self.run = sorted(computing, key=lambda i: tails[i])
        self.position = {i: p for p, i in enumerate(self.run)}
        self.ready = self.ready_positions()
        self.first_use = self.use_positions()

    def last_buckets(self) -> list[int]:
        """For each step, find the last reduction bucket that it depends on."""
        tails = [-1] * len(self.flow.plan.steps)
        for i in self.assignment.order:
            for source in self.flow.sources(i):
                tails[i] = max(tails[i], tails[source])
            for t in self.flow.transfers.get(i, ()):
                batch = self.assignment.of[t.key]
                if batch.reduces and batch.members[0].options is not None:
                    tails[i] = max(tails[i], batch.index)
        return tails

    def late_steps(self) -> list[bool]:
        """Find the steps that run only when needed, such as weight decay, which reads inputs
        alone.
        """
        flow = self.flow
        tails = self.tails
        late = [False] * len(tails)
        effective = list(tails)
        for i in reversed(self.assignment.order):
            if i in flow.transfers:
                effective[i] = -1  # payloads are computed as written
            elif flow.readers[i] and i not in flow.returned:
                effective[i] = max(tails[i], min(effective[r] for r in flow.readers[i]))
                late[i] = effective[i] > tails[i]
        for i in self.assignment.order:
            ready = all(
                late[s] or isinstance(flow.plan.steps[s], plan.Fill) for s in flow.sources(i)
            )
            late[i] = ready and (late[i] or flow.rearranges_input(i))
        return late

    def ready_positions(self) -> list[int]:
        """For each batch, find the position at which its payloads are computed."""
        after = [0] * len(self.flow.plan.steps)
        for i in self.assignment.order:
            sources = (after[s] for s in self.flow.sources(i))
            after[i] = self.position[i] + 1 if i in self.position else max(sources, default=0)
        return [
            max(self.source_position(t.step, after) for t in b.members)
            for b in self.assignment.batches
        ]

    def source_position(self, step: int, after: list[int]) -> int:
        """Return the position at which the inputs of a step are computed."""
        return max((after[s] for s in self.flow.sources(step)), default=0)

    def use_positions(self) -> list[int]:
        """For each batch, find the position of its first reader."""
        end = len(self.run)
        used = [end] * len(self.flow.plan.steps)
        for i in reversed(self.assignment.order):
            reading = min((used[r] for r in self.flow.readers[i]), default=end)
            used[i] = self.position.get(i, reading)
        uses = [end] * len(self.assignment.batches)
        for i, sent in self.flow.transfers.items():
            for t in sent:
                batch = self.assignment.of[t.key].index
                uses[batch] = min(uses[batch], *(used[r] for r in self.flow.readers[i]), end)
        return uses

    def starts(self) -> list[tuple[int, Batch]]:
        """Decide the position before which each batch starts, in the order of starts."""
        batches = self.assignment.batches
        early = sorted(
            (b for b in batches if self.is_prefetched(b)),
            key=lambda b: (self.first_use[b.index], b.index),
        )
        issue = {b.index: min(self.ready[b.index], self.first_use[b.index]) for b in batches}
        issue.update((b.index, self.first_use[a.index]) for a, b in itertools.pairwise(early))
        for i, before in self.chained():
            issue[i] = max(
                issue[i],
                min(self.first_use[i], max(issue[before], self.next_ready(batches[before]))),
            )
        keys = {b.index: (issue[b.index], self.first_use[b.index], b.index, 0) for b in batches}
        if self.assignment.after:
            self.hold_order(keys)
        return self.bounded(
            [(keys[b.index][0], b) for b in sorted(batches, key=lambda b: keys[b.index])]
        )

    def hold_order(self, keys: dict[int, tuple[int, int, int, int]]) -> None:
        """Move batches after those that the user's plan lists before them."""
        queue = list(keys)
        batches = self.assignment.batches
        while queue:
            i = queue.pop()
            issue, use, number, turn = keys[i]
            later = [
                b.index
                for b in batches
                if self.assignment.after.get(b.index) == i or b.depends >> i & 1
            ]
            for k in later:
                if keys[k] <= keys[i]:
                    keys[k] = issue, use, number, turn + 1
                    queue.append(k)

    def is_prefetched(self, batch: Batch) -> bool:
        """Return whether a batch gathers inputs, which are available from the start."""
        return (
            batch.members[0].kind == ALL_GATHER
            and self.ready[batch.index] == 0
            and not batch.depends
        )

    def chained(self) -> Iterator[tuple[int, int]]:
        """Yield pairs of batches of which one sends the unchanged result of the other."""
        flow = self.flow
        of = self.assignment.of
        for i in self.assignment.order:
            sent = flow.transfers.get(i, ())
            before = (
                [flow.transfers[s][-1] for s in flow.sources(i) if s in flow.transfers]
                if sent
                else []
            )
            for first, second in [*((a, sent[0]) for a in before), *itertools.pairwise(sent)]:
                yield of[second.key].index, of[first.key].index

    def next_ready(self, batch: Batch) -> int:
        """Return the start of the next reduction, by which time this one may have finished."""
        later = (
            self.ready[b.index]
            for b in self.assignment.batches[batch.index + 1 :]
            if b.members[0].kind == batch.members[0].kind
        )
        return next(later, len(self.run))

    def depends(self, batch: Batch, on: Batch) -> bool:
        """Return whether one batch depends on another."""
        return reaches(self.assignment.batches, -1, batch.depends, on)

    def bounded(self, planned: list[tuple[int, Batch]]) -> list[tuple[int, Batch]]:
        """Delay starts so that the bytes in flight stay below the limit."""
        limit = min(
            (
                t.options.max_in_flight
                for _, b in planned
                for t in b.members
                if t.options is not None
            ),
            default=DEFAULT_IN_FLIGHT,
        )
        flying: list[tuple[int, int, Batch]] = []  # by first use
        total = 0
        reached = 0
        out = []
        for issue, batch in planned:
            reached, use = max(reached, issue), self.first_use[batch.index]
            while flying and (
                flying[0][0] < reached or total + batch.nbytes + batch.riding > limit
            ):
                over, _, oldest = flying.pop(0)
                total -= oldest.nbytes + oldest.riding
                if over >= reached and self.is_prefetched(batch) and over < use:
                    reached = over + 1
                elif over >= reached and not self.depends(oldest, batch):
                    self.forced.setdefault(batch.index, []).append(oldest.index)
            bisect.insort(flying, (use, batch.index, batch), key=lambda entry: entry[:2])
            total += batch.nbytes + batch.riding
            out.append((reached, batch))
        return out


def _walk(timing: _Timing, starts: list[tuple[int, Batch]]) -> Iterator[Item]:
    """Yield the steps in order, with each start at its position and each item after what it
    needs.
    """
    order = _Order(timing)
    queue = collections.deque(starts)
    for position, step in enumerate(timing.run):
        while queue and queue[0][0] <= position:
            _, batch = queue.popleft()
            yield from order.place(("start", batch.index))
        yield from order.place(("run", step))
    for _, batch in queue:
        yield from order.place(("start", batch.index))
    for step in range(len(timing.flow.plan.steps)):
        yield from order.place(order.provider(step))


@attrs.define(eq=False)
class _Order:
    """The items placed so far, each after the items that it needs."""

    timing: _Timing
    placed: set[Item] = attrs.field(factory=set)

    def place(self, item: Item) -> Iterator[Item]:
        """Place an item after all missing items that it needs, depth first without recursion."""
        if item in self.placed:
            return
        stack = [(item, iter(self.needs(item)))]
        waiting = {item}
        while stack:
            current, needs = stack[-1]
            missing = next((n for n in needs if n not in self.placed), None)
            if missing is None:
                stack.pop()
                waiting.discard(current)
                self.placed.add(current)
                yield current
            else:
                assert missing not in waiting, f"{missing} and {current} need each other"
                waiting.add(missing)
                stack.append((missing, iter(self.needs(missing))))

    def provider(self, step: int) -> Item:
        """Return the item after which the result of a step is available."""
        transfers = self.timing.flow.transfers.get(step)
        if not transfers:
            return "run", step
        return "wait", self.timing.assignment.of[transfers[-1].key].index

    def needs(self, item: Item) -> list[Item]:
        """List the items that must come before one."""
        kind, i = item
        if kind == "run":
            return self.providers(i)
        if kind == "wait":
            return [("start", i)]
        return self.needs_of_start(i)

    def providers(self, step: int) -> list[Item]:
        """List the items after which the inputs of a step are available."""
        return [self.provider(source) for source in self.timing.flow.sources(step)]

    def needs_of_start(self, index: int) -> list[Item]:
        """List the items before the start of a batch: older batches, and its payloads."""
        assignment = self.timing.assignment
        needs: list[Item] = [("wait", older) for older in self.timing.forced.get(index, ())]
        if index in assignment.after:
            needs.append(("start", assignment.after[index]))
        for transfer in assignment.batches[index].members:
            before = _before(self.timing, transfer.step, transfer.key)
            needs += before or self.providers(transfer.step)
        return needs


def _before(timing: _Timing, step: int, key: object) -> list[Item]:
    """Return the wait for the previous transfer of the same redistribution."""
    sent = [t.key for t in timing.flow.transfers[step]]
    at = sent.index(key)
    return [("wait", timing.assignment.of[sent[at - 1]].index)] if at else []
