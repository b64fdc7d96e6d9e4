"""What all ranks agree on before any of them writes its graph: which collectives are joined, and in which order all runs."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import attrs
import torch

from ..buckets import Bucket, BucketPlan, checked_caps
from ..errors import TreeError, problem
from ..partition import Plan
from ..partition.steps import Gradient
from ..types import MeshAxes
from ._assign import SAME_PROGRAM, Assignment, Batch, assign
from ._flow import Flow, flow
from ._sequence import Item, sequence


@attrs.frozen(eq=False)
class Agenda:
    """The schedule of a program, the same on all ranks."""

    axes: MeshAxes
    plan: BucketPlan
    members: tuple[tuple[Any, ...], ...]  # of each batch: the keys of its transfers
    batch_of: dict[Any, int]  # a transfer's key -> its batch
    dtypes: dict[int, torch.dtype]  # of the batches that are reduced in a dtype of their own
    bucket_of: dict[int, int]  # the batches that are buckets, by their number in the plan
    starts: tuple[int, ...]  # batches, in the order in which they start
    sequence: tuple[Item, ...]


def agenda(plan: Plan, name: str) -> Agenda:
    """Decide what travels together, and when.

    Args:
        plan: of the partition.
        name: of the program, for errors and for the bucket plan.

    Raises:
        TreeError: a given bucket plan that does not fit.
    """
    steps = flow(attrs.evolve(plan, gradients=tuple(_own_rows(plan))))
    assignment = assign(steps, name)
    starts, items = sequence(steps, assignment)
    bucketed = [b for b in assignment.batches if b.bucketed]
    casts = {b.index: t.dtype for b in assignment.batches for t in b.members[:1] if t.wish is not None and t.wish.reduce_dtype}
    return Agenda(
        axes=plan.axes,
        plan=_bucket_plan(steps, assignment, bucketed, name),
        members=tuple(tuple(t.key for t in b.members) for b in assignment.batches),
        batch_of={key: b.index for key, b in assignment.of.items()},
        dtypes={i: dtype for i, dtype in casts.items() if assignment.batches[i].reduces},
        bucket_of={b.index: number for number, b in enumerate(bucketed)},
        starts=starts,
        sequence=items,
    )


def rewished(plan: Plan, name: str, cap: Any, first_cap: Any, wanted: BucketPlan | None) -> Plan:
    """The plan of a partition with other caps, or other buckets, than those that bucketed_grad asked for."""
    if cap is None and first_cap is None and wanted is None:
        return plan
    if wanted is not None and not isinstance(wanted, BucketPlan):
        fix = "the plan of fn.lower(...).plan, or BucketPlan.load(path)"
        raise TreeError(problem(f"{name}, plan", f"a {type(wanted).__name__}", needed="a BucketPlan", fix=fix), fix=fix)
    regions = {region: i for i, region in enumerate(dict.fromkeys(g.region for g in plan.gradients))}
    found = []
    for region, number in regions.items():
        mine = [g for g in plan.gradients if g.region == region]
        rows = None if wanted is None else wanted.rows(name, [g.wish.leaf for g in mine], number)
        for g in mine:
            caps = checked_caps(name, (g.wish.cap if cap is None else cap, first_cap, g.wish.max_in_flight))
            following = None if rows is None else tuple(rows[g.wish.leaf])
            found.append(attrs.evolve(g, wish=attrs.evolve(g.wish, cap=caps[0], first_cap=caps[1], rows=following)))
    return attrs.evolve(plan, gradients=tuple(found))


def _own_rows(plan: Plan) -> Iterator[Gradient]:
    """The gradients, each with what a given plan says of its own bucketed_grad; a plan of another program's has but one."""
    regions = {region: i for i, region in enumerate(dict.fromkeys(g.region for g in plan.gradients))}
    for g in plan.gradients:
        if not g.wish.rows:
            yield g
            continue
        there = {row[7] for row in g.wish.rows}
        mine = regions[g.region] if regions[g.region] in there else min(there)
        yield attrs.evolve(g, wish=attrs.evolve(g.wish, rows=tuple(row for row in g.wish.rows if row[7] == mine)))


def _bucket_plan(steps: Flow, assignment: Assignment, bucketed: list[Batch], name: str) -> BucketPlan:
    regions = {region: i for i, region in enumerate(dict.fromkeys(g.region for g in steps.plan.gradients))}
    buckets = tuple(_bucket(steps, number, b, regions) for number, b in enumerate(bucketed))
    _refuse_unused_rows(buckets, steps, name)
    reduced = {t.wish.leaf for b in assignment.batches for t in b.members if t.wish is not None and b.reduces}
    ignored = [g.wish.leaf for g in steps.plan.gradients if g.wish.ignored and g.wish.leaf in reduced]
    unused = [g.wish.leaf for g in steps.plan.gradients if g.unused]
    leaving = {node for _, node in steps.plan.unreduced}
    unreduced = [g.wish.leaf for g in steps.plan.gradients if g.node in leaving]
    told = {*reduced, *unused, *unreduced}
    local = [g.wish.leaf for g in steps.plan.gradients if g.wish.leaf not in told]
    once = [tuple(dict.fromkeys(leaves)) for leaves in (ignored, unused, local, unreduced)]
    return BucketPlan(name, str(steps.plan.axes), buckets, *once)


def _bucket(steps: Flow, number: int, batch: Batch, regions: dict[str, int]) -> Bucket:
    members = [t for t in batch.members if t.wish is not None]
    first = members[0]
    sources = [s for t in members for s in steps.sources(t.step) if not steps.rearranges_input(s)]
    readers = [r for t in members for r in steps.readers[t.step]]
    return Bucket(
        index=number,
        kind=first.kind,
        axis=first.axis,
        op=first.op,
        dtype=str(first.dtype).removeprefix("torch."),
        phase=first.phase,
        leaves=tuple(t.wish.leaf for t in members if t.wish is not None),
        sizes=tuple(t.nbytes for t in members),
        cap=batch.cap,
        ready=_said(steps, max(sources, default=None), "start"),
        first_use=_said(steps, min(readers, default=None), "result"),
        region=regions[members[-1].region],
        riding=batch.riding,
    )


def _said(steps: Flow, i: int | None, otherwise: str) -> str:
    """A step, for people: its op and line."""
    if i is None:
        return otherwise
    node = steps.plan.steps[i].node
    source = node.meta.get("source")
    return node.name + (f", {source.rsplit('/', 1)[-1]}" if source else "")


def _refuse_unused_rows(buckets: tuple[Bucket, ...], steps: Flow, name: str) -> None:
    """A given plan may hold nothing that the program does not send."""
    found = collections.Counter((leaf, b.kind, b.axis, b.phase) for b in buckets for leaf in b.leaves)
    wanted = collections.Counter((g.wish.leaf, *row[1:4]) for g in steps.plan.gradients for row in g.wish.rows or ())
    extra = list((wanted - found).elements()) if wanted else []
    if extra:
        lines = [f"the plan has {leaf} in an {kind} over {axis} in the {phase}" for leaf, kind, axis, phase in extra]
        text = problem(f"{name}, plan", "it sends what this program does not send", *lines, fix=SAME_PROGRAM)
        raise TreeError(text, arg_path=extra[0][0], fix=SAME_PROGRAM)
