"""The bucket plan as the user sees it: every collective on the way to a gradient, including
those inside loops and branches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import torch

from ...buckets import Bucket, BucketPlan, Unbucketed
from ...ops.nodes import origin_of
from ...partition import Plan
from ...source_text import located_in_program
from ..data_flow import Flow, Transfer
from .assign_buckets import Assignment
from .batches import Batch

Numbers = Mapping[tuple[Plan, int], int]  # (graph, batch) -> number of the bucket


@attrs.frozen(eq=False)
class Level:
    """One graph of a program (itself, or a loop body), with its data flow and batches."""

    plan: Plan
    flow: Flow  # the gradients of the plan, with the rows of their own bucketed_grad call
    assignment: Assignment
    inside: str  # the loop or branch that runs it; empty for the program itself
    times: int  # how often one call of the program runs it
    inner: tuple[Level, ...]


def numbered(levels: Sequence[Level]) -> Numbers:
    """Number the buckets of all graphs, in the order in which they fill or as the user's plan
    lists them.
    """
    pairs = [(level, b) for level in levels for b in level.assignment.batches if b.bucketed]
    planned = [i for i, (_, b) in enumerate(pairs) if b.wanted is not None]
    if len({pairs[i][1].wanted for i in planned}) == len(planned):
        wanted = sorted((pairs[i] for i in planned), key=lambda pair: pair[1].planned)
        for i, pair in zip(planned, wanted, strict=True):
            pairs[i] = pair
    return {(level.plan, b.index): number for number, (level, b) in enumerate(pairs)}


def bucket_plan(
    levels: Sequence[Level], numbers: Numbers, regions: Mapping[str, int], name: str
) -> BucketPlan:
    """Build the public BucketPlan of a program."""
    buckets = {
        numbers[level.plan, batch.index]: _bucket(
            level, numbers[level.plan, batch.index], batch, regions
        )
        for level in levels
        for batch in level.assignment.batches
        if batch.bucketed
    }
    unbucketed = [
        _unbucketed(level, transfer)
        for level in levels
        if level.times
        for transfer in _on_the_way(level)
    ]
    groups = _grouped(levels, unbucketed)
    return BucketPlan(
        name=name,
        mesh=str(levels[0].plan.axes),
        buckets=tuple(buckets[number] for number in range(len(buckets))),
        ignored=groups.ignored,
        unused=groups.unused,
        local=groups.local,
        unreduced=groups.unreduced,
        unbucketed=tuple(unbucketed),
    )


class Groups(NamedTuple):
    """The gradients that are in no bucket, by reason."""

    ignored: tuple[str, ...]
    unused: tuple[str, ...]
    local: tuple[str, ...]
    unreduced: tuple[str, ...]


def _grouped(levels: Sequence[Level], unbucketed: Sequence[Unbucketed]) -> Groups:
    """Group the gradients that are in no bucket: ignored, unused, local, unreduced."""
    gradients = [g for level in levels for g in level.flow.plan.gradients]
    reduced = {
        t.options.leaf
        for level in levels
        for t in level.assignment.transfers
        if t.reduces and t.options is not None
    }
    leaving = {node for level in levels for _, node in level.plan.unreduced}
    ignored = [g.options.leaf for g in gradients if g.options.ignored and g.options.leaf in reduced]
    unused = [g.options.leaf for g in gradients if g.unused]
    unreduced = [g.options.leaf for g in gradients if g.node in leaving]
    on_the_way = [leaf for sent in unbucketed for leaf in sent.leaves]
    known = {*reduced, *unused, *unreduced, *on_the_way}
    local = [g.options.leaf for g in gradients if g.options.leaf not in known]
    return Groups(*map(_once, (ignored, unused, local, unreduced)))


def _once(leaves: Iterable[str]) -> tuple[str, ...]:
    """Drop duplicates."""
    return tuple(dict.fromkeys(leaves))


def _on_the_way(level: Level) -> Iterator[Transfer]:
    """Yield the transfers of gradient terms that are in no bucket."""
    seen = set[Any]()
    for i, sent in level.flow.transfers.items():
        (made,) = level.plan.steps[i].made
        for t in sent:
            known = t.key in seen or level.assignment.of[t.key].bucketed
            if not known and level.flow.served.get(made.number):
                seen.add(t.key)
                yield t


def _unbucketed(level: Level, t: Transfer) -> Unbucketed:
    """Describe a transfer that is in no bucket."""
    (made,) = level.plan.steps[t.step].made
    return Unbucketed(
        kind=t.kind,
        axis=t.axis,
        op=t.op,
        dtype=_dtype(t.dtype),
        leaves=tuple(sorted({g.options.leaf for g in level.flow.served[made.number] or ()})),
        nbytes=t.nbytes,
        ready=_step_text(level.flow, max(level.flow.sources(t.step), default=None), "start"),
        inside=level.inside,
        times=level.times,
    )


def _bucket(level: Level, number: int, batch: Batch, regions: Mapping[str, int]) -> Bucket:
    """Describe one bucket: its collective, leaves, bytes, and when it is ready."""
    steps = level.flow
    members = batch.leaves
    first = members[0]
    sources = [s for t in members for s in steps.sources(t.step) if not steps.rearranges_input(s)]
    readers = [r for t in members for r in steps.readers[t.step]]
    return Bucket(
        index=number,
        kind=first.kind,
        axis=first.axis,
        op=first.op,
        dtype=_dtype(first.dtype),
        phase=first.phase,
        leaves=tuple(t.options.leaf for t in members if t.options is not None),
        sizes=tuple(t.nbytes for t in members),
        cap=batch.cap,
        ready=_step_text(steps, max(sources, default=None), "start"),
        first_use=_step_text(steps, min(readers, default=None), "result"),
        region=regions[members[-1].region],
        riding=batch.riding,
        inside=level.inside,
        times=level.times,
    )


def _dtype(dtype: torch.dtype) -> str:
    """Write a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


def _step_text(steps: Flow, i: int | None, otherwise: str) -> str:
    """Write a step as text: its op and source line."""
    if i is None:
        return otherwise
    node = steps.plan.steps[i].node
    return line_of(node.name, node)


def line_of(name: str, node: torch.fx.Node) -> str:
    """Append a node's source line to a name."""
    place = located_in_program(**origin_of(node))
    return f"{name}, {place}" if place else name
