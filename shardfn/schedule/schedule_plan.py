"""The decisions that all ranks make alike before they emit their graphs: which collectives
share a bucket, and the order of all steps.

Each graph of a loop or a branch has a SchedulePlan of its own. The bucket plan covers all
of them.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from ..buckets import BucketOptions, BucketPlan
from ..byte_sizes import check_caps
from ..errors import TreeError
from ..ops.loops import Scan
from ..partition import Plan
from ..partition.plan import Gradient, Nested
from ..types import MeshAxes
from .bucketing import gradient_terms
from .bucketing.assign_buckets import assign
from .bucketing.batches import SAME_PROGRAM
from .bucketing.bucket_plan import Level, bucket_plan, line_of, numbered
from .check import check_plan
from .data_flow import flow
from .step_order import Item, sequence

CAP_OR_PLAN = "pass either caps or a plan: a plan states where each bucket closes"


@attrs.frozen(eq=False)
class SchedulePlan:
    """The schedule of one graph, equal on all ranks: batches of collectives and the order of
    steps.
    """

    axes: MeshAxes
    plan: BucketPlan
    members: tuple[tuple[Any, ...], ...]  # the keys of each batch's transfers
    batch_of: dict[Any, int]  # a transfer's key -> its batch
    dtypes: dict[int, torch.dtype]  # for batches that are reduced in another dtype
    bucket_of: dict[int, int]  # the batches that are buckets, by their number in the plan
    starts: tuple[int, ...]  # batches, in the order in which they start
    sequence: tuple[Item, ...]
    inside: dict[Plan, SchedulePlan]  # the schedule_plan of each graph of a loop or a branch


def plan_schedule(plan: Plan, name: str) -> SchedulePlan:
    """Decide which transfers share a collective, and the order of all steps.

    Args:
        plan: the plan of the partition.
        name: the name of the program, for errors and for the bucket plan.

    Raises:
        TreeError: a given bucket plan that does not fit.
    """
    check_plan(plan)
    regions = _regions(plan)
    whole = _level(plan, name, regions, [None] * len(plan.outs))
    levels = [*_all(whole)]
    numbers = numbered(levels)
    bucketing = bucket_plan(levels, numbers, regions, name)
    _refuse_unused_rows(bucketing, levels, name)
    return _settled(whole, bucketing, numbers)


def _regions(plan: Plan) -> dict[str, int]:
    """Number the bucketed_grad calls of a program."""
    return {
        region: i for i, region in enumerate(dict.fromkeys(g.region for g in all_gradients(plan)))
    }


def all_gradients(plan: Plan) -> Iterator[Gradient]:
    """Yield the gradients of a program, with those inside loops and branches."""
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
    """Compute the data flow and the batches of a graph, and of the graphs inside it.

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
    """Yield a graph, then the graphs inside it."""
    yield level
    for inner in level.inner:
        yield from _all(inner)


def _settled(
    level: Level, bucketing: BucketPlan, numbers: Mapping[tuple[Plan, int], int]
) -> SchedulePlan:
    """Decide the order of a graph, and of the graphs inside it."""
    assignment = level.assignment
    starts, items = sequence(level.flow, assignment)
    batches = assignment.batches
    first = {b.index: b.members[0] for b in batches}
    casts = {
        i: t.dtype for i, t in first.items() if t.options is not None and t.options.reduce_dtype
    }
    return SchedulePlan(
        axes=level.plan.axes,
        plan=bucketing,
        members=tuple(tuple(t.key for t in b.members) for b in batches),
        batch_of={key: b.index for key, b in assignment.of.items()},
        dtypes={i: dtype for i, dtype in casts.items() if batches[i].reduces},
        bucket_of={b.index: numbers[level.plan, b.index] for b in batches if b.bucketed},
        starts=starts,
        sequence=items,
        inside={inner.plan: _settled(inner, bucketing, numbers) for inner in level.inner},
    )


def with_bucket_options(
    plan: Plan, name: str, cap: Any, first_cap: Any, wanted: BucketPlan | None
) -> Plan:
    """Return the plan with other caps or buckets than bucketed_grad gave."""
    has_caps = cap is not None or first_cap is not None
    if not has_caps and wanted is None:
        return plan
    _refuse_no_plan(name, has_caps, wanted)
    by_region: dict[str, list[Gradient]] = collections.defaultdict(list)
    for g in all_gradients(plan):
        by_region[g.region].append(g)
    new_gradients: dict[Gradient, Gradient] = {}
    for number, gradients in enumerate(by_region.values()):
        leaves = [g.options.leaf for g in gradients]
        rows = None if wanted is None else wanted.rows(name, leaves, number)
        for g in gradients:
            other = _other_caps(g.options, name, cap, first_cap)
            if rows is not None:
                other = attrs.evolve(other, rows=tuple(rows[g.options.leaf]))
            new_gradients[g] = attrs.evolve(g, options=other)
    return _with_wishes(plan, new_gradients)


def _refuse_no_plan(name: str, has_caps: bool, wanted: Any) -> None:
    """Raise an error for a plan that is not a BucketPlan, or for caps next to a plan."""
    if wanted is None:
        return
    if not isinstance(wanted, BucketPlan):
        fix = "pass fn.lower(...).plan, or BucketPlan.load(path)"
        got = f"a {type(wanted).__name__}"
        raise TreeError.of(f"{name}, plan", got, needed="a BucketPlan", fix=fix)
    if has_caps:
        got = "lower was called with both bucket caps (limits in bytes) and a bucket plan"
        raise TreeError.of(f"{name}, plan", got, fix=CAP_OR_PLAN)


def _other_caps(options: BucketOptions, name: str, cap: Any, first_cap: Any) -> BucketOptions:
    """Replace the caps in the bucketing options of a gradient."""
    own_cap = options.cap if cap is None else cap
    cap, first_cap, *_ = check_caps(name, (own_cap, first_cap, options.max_in_flight))
    return attrs.evolve(options, cap=cap, first_cap=first_cap, rows=None)


def _with_wishes(plan: Plan, new_gradients: Mapping[Gradient, Gradient]) -> Plan:
    """Replace the gradients of a plan, and of the plans inside it."""
    steps = tuple(
        attrs.evolve(step, plans=tuple(_with_wishes(inner, new_gradients) for inner in step.plans))
        if isinstance(step, Nested)
        else step
        for step in plan.steps
    )
    return attrs.evolve(
        plan, steps=steps, gradients=tuple(new_gradients[g] for g in plan.gradients)
    )


def _own_rows(plan: Plan, regions: Mapping[str, int]) -> Iterator[Gradient]:
    """Yield the gradients, each with the rows of the user's plan for its bucketed_grad call."""
    for g in plan.gradients:
        if not g.options.rows:
            yield g
            continue
        there = {row.region for row in g.options.rows}
        mine = regions[g.region] if regions[g.region] in there else min(there)
        rows = tuple(row for row in g.options.rows if row.region == mine)
        yield attrs.evolve(g, options=attrs.evolve(g.options, rows=rows))


def _refuse_unused_rows(bucketing: BucketPlan, levels: Sequence[Level], name: str) -> None:
    """Raise an error for rows of the user's plan that the program does not send."""
    found = collections.Counter(
        (leaf, b.kind, b.axis, b.phase) for b in bucketing.buckets for leaf in b.leaves
    )
    gradients = [g for level in levels for g in level.flow.plan.gradients]
    wanted = collections.Counter(
        (g.options.leaf, *row.what) for g in gradients for row in g.options.rows or ()
    )
    extra = list((wanted - found).elements()) if wanted else []
    if extra:
        lines = [
            f"the bucket plan sends {leaf} by an {kind} over {axis} in the {phase}"
            for leaf, kind, axis, phase in extra
        ]
        raise TreeError.of(
            f"{name}, plan",
            "the plan has collectives that this program does not have",
            *lines,
            fix=SAME_PROGRAM,
            arg_path=extra[0][0],
        )
