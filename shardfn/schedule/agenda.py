"""The decisions that all ranks make alike before they emit their graphs: which collectives
share a bucket, and the order of all steps.

Each graph of a loop or a branch has an agenda of its own. The bucket plan covers all of them.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from ..buckets import BucketPlan, Wish
from ..byte_sizes import checked_caps
from ..errors import TreeError
from ..ops.loops import Scan
from ..partition import Plan
from ..partition.plan import Gradient, Nested
from ..types import MeshAxes
from .bucketing import gradient_terms
from .bucketing.assign import assign
from .bucketing.batches import SAME_PROGRAM
from .bucketing.bucket_plan import Level, bucket_plan, line_of, numbered
from .flow import flow
from .sequence import Item, sequence

CAP_OR_PLAN = "one of them: a plan says where each bucket closes"


@attrs.frozen(eq=False)
class Agenda:
    """The schedule of a program, the same on all ranks."""

    axes: MeshAxes
    plan: BucketPlan
    members: tuple[tuple[Any, ...], ...]  # the keys of each batch's transfers
    batch_of: dict[Any, int]  # a transfer's key -> its batch
    dtypes: dict[int, torch.dtype]  # for batches that are reduced in another dtype
    bucket_of: dict[int, int]  # the batches that are buckets, by their number in the plan
    starts: tuple[int, ...]  # batches, in the order in which they start
    sequence: tuple[Item, ...]
    inside: dict[Plan, Agenda]  # the agenda of each graph of a loop or a branch


def agenda(plan: Plan, name: str) -> Agenda:
    """Decide which transfers share a collective, and the order of all steps.

    Args:
        plan: the plan of the partition.
        name: the name of the program, for errors and for the bucket plan.

    Raises:
        TreeError: a given bucket plan that does not fit.
    """
    regions = _regions(plan)
    whole = _level(plan, name, regions, [None] * len(plan.outs))
    levels = [*_all(whole)]
    numbers = numbered(levels)
    told = bucket_plan(levels, numbers, regions, name)
    _refuse_unused_rows(told, levels, name)
    return _settled(whole, told, numbers)


def _regions(plan: Plan) -> dict[str, int]:
    """The calls of bucketed_grad in a program, numbered. Calls outside of loops and branches
    come first.
    """
    return {
        region: i for i, region in enumerate(dict.fromkeys(g.region for g in all_gradients(plan)))
    }


def all_gradients(plan: Plan) -> Iterator[Gradient]:
    """The gradients of a program, including those inside loops and branches."""
    yield from plan.gradients
    for step in plan.steps:
        if isinstance(step, Nested):
            for inner in step.plans:
                yield from all_gradients(inner)


def _level(
    plan: Plan,
    name: str,
    regions: Mapping[str, int],
    outs: gradient_terms.Outs,
    inside: str = "",
    times: int = 1,
) -> Level:
    """The agenda of one graph of a program, and of the graphs inside it.

    Args:
        plan: of the graph.
        name: of the program, for errors.
        regions: the calls of bucketed_grad, numbered.
        outs: for each result, the gradient that it is a term of.
        inside: the loop or branch that runs it.
        times: how often one call of the program runs it.
    """
    steps = flow(attrs.evolve(plan, gradients=tuple(_own_rows(plan, regions))), outs)
    inner = []
    for step in plan.steps:
        if isinstance(step, Nested):
            loop = step.node.target
            where = line_of(str(loop), step.node) + (f" in {inside}" if inside else "")
            runs = times * (loop.length if isinstance(loop, Scan) else 1)
            inner += [
                _level(p, name, regions, o, where, runs)
                for p, o in gradient_terms.inside(step, steps.served)
            ]
    return Level(plan, steps, assign(steps, name), inside, times, tuple(inner))


def _all(level: Level) -> Iterator[Level]:
    """A graph, then the graphs inside it."""
    yield level
    for inner in level.inner:
        yield from _all(inner)


def _settled(level: Level, told: BucketPlan, numbers: Mapping[tuple[Plan, int], int]) -> Agenda:
    """The agenda of a graph and of the graphs inside it."""
    assignment = level.assignment
    starts, items = sequence(level.flow, assignment)
    batches = assignment.batches
    first = {b.index: b.members[0] for b in batches}
    casts = {i: t.dtype for i, t in first.items() if t.wish is not None and t.wish.reduce_dtype}
    return Agenda(
        axes=level.plan.axes,
        plan=told,
        members=tuple(tuple(t.key for t in b.members) for b in batches),
        batch_of={key: b.index for key, b in assignment.of.items()},
        dtypes={i: dtype for i, dtype in casts.items() if batches[i].reduces},
        bucket_of={b.index: numbers[level.plan, b.index] for b in batches if b.bucketed},
        starts=starts,
        sequence=items,
        inside={inner.plan: _settled(inner, told, numbers) for inner in level.inner},
    )


def rewished(plan: Plan, name: str, cap: Any, first_cap: Any, wanted: BucketPlan | None) -> Plan:
    """The plan of a partition with other caps or buckets than those of bucketed_grad."""
    has_caps = cap is not None or first_cap is not None
    if not has_caps and wanted is None:
        return plan
    _refuse_no_plan(name, has_caps, wanted)
    by_region: dict[str, list[Gradient]] = collections.defaultdict(list)
    for g in all_gradients(plan):
        by_region[g.region].append(g)
    wishes: dict[Gradient, Gradient] = {}
    for number, gradients in enumerate(by_region.values()):
        leaves = [g.wish.leaf for g in gradients]
        rows = None if wanted is None else wanted.rows(name, leaves, number)
        for g in gradients:
            other = _other_caps(g.wish, name, cap, first_cap)
            if rows is not None:
                other = attrs.evolve(other, rows=tuple(rows[g.wish.leaf]))
            wishes[g] = attrs.evolve(g, wish=other)
    return _with_wishes(plan, wishes)


def _refuse_no_plan(name: str, has_caps: bool, wanted: Any) -> None:
    """Refuse a given plan that is not a BucketPlan, and caps beside a plan."""
    if wanted is None:
        return
    if not isinstance(wanted, BucketPlan):
        fix = "the plan of fn.lower(...).plan, or BucketPlan.load(path)"
        got = f"a {type(wanted).__name__}"
        raise TreeError.of(f"{name}, plan", got, needed="a BucketPlan", fix=fix)
    if has_caps:
        got = "lower is given caps and a plan"
        raise TreeError.of(f"{name}, plan", got, fix=CAP_OR_PLAN)


def _other_caps(wish: Wish, name: str, cap: Any, first_cap: Any) -> Wish:
    """Bucketing options with these caps, checked, and without rows. Without a cap, the old one
    stays.
    """
    own_cap = wish.cap if cap is None else cap
    cap, first_cap, *_ = checked_caps(name, (own_cap, first_cap, wish.max_in_flight))
    return attrs.evolve(wish, cap=cap, first_cap=first_cap, rows=None)


def _with_wishes(plan: Plan, wishes: Mapping[Gradient, Gradient]) -> Plan:
    """The plan, and the plans inside it, with other gradients in place of their own."""
    steps = tuple(
        attrs.evolve(step, plans=tuple(_with_wishes(inner, wishes) for inner in step.plans))
        if isinstance(step, Nested)
        else step
        for step in plan.steps
    )
    return attrs.evolve(plan, steps=steps, gradients=tuple(wishes[g] for g in plan.gradients))


def _own_rows(plan: Plan, regions: Mapping[str, int]) -> Iterator[Gradient]:
    """The gradients, each with the rows that a given plan has for its bucketed_grad call. A
    plan from another program may have rows for one call only.
    """
    for g in plan.gradients:
        if not g.wish.rows:
            yield g
            continue
        there = {row.region for row in g.wish.rows}
        mine = regions[g.region] if regions[g.region] in there else min(there)
        rows = tuple(row for row in g.wish.rows if row.region == mine)
        yield attrs.evolve(g, wish=attrs.evolve(g.wish, rows=rows))


def _refuse_unused_rows(told: BucketPlan, levels: Sequence[Level], name: str) -> None:
    """Refuse a given plan with rows that the program does not send."""
    found = collections.Counter(
        (leaf, b.kind, b.axis, b.phase) for b in told.buckets for leaf in b.leaves
    )
    gradients = [g for level in levels for g in level.flow.plan.gradients]
    wanted = collections.Counter(
        (g.wish.leaf, *row.what) for g in gradients for row in g.wish.rows or ()
    )
    extra = list((wanted - found).elements()) if wanted else []
    if extra:
        lines = [
            f"the plan has {leaf} in an {kind} over {axis} in the {phase}"
            for leaf, kind, axis, phase in extra
        ]
        raise TreeError.of(
            f"{name}, plan",
            "it has collectives that this program does not have",
            *lines,
            fix=SAME_PROGRAM,
            arg_path=extra[0][0],
        )
