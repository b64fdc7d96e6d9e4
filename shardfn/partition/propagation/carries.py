"""The carries of a loop: the placements with which every run leaves them as it found them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import attrs
import torch

from ...errors import PlacementError, problem
from ...ops.nodes import args_of
from ...placements import describe
from ...types import PENDING, Mark, Marks, MeshAxes
from .. import layout
from .. import plan as steps
from ..protocols import Walk
from . import deferred
from .values import Value, is_partial

ROUNDS = 6  # after so many walks over a loop's graph its carries are redistributed in every run
CONSTRAIN = "prim_redistribute"


class Inside:
    """A walk over the graph of a loop, whose inputs are placed so.

    Args:
        around: the walk over the graph that the loop stands in.
        graph: one of the loop's.
        ins: the placements of its inputs.
        values: what comes in at first.
        later: gradients that stay Partial.
    """

    def __init__(
        self,
        around: Walk,
        graph: torch.fx.Graph,
        ins: Sequence[Marks],
        values: Sequence[Value],
        later: Collection[torch.fx.Node] = (),
    ) -> None:
        self.walk = around.fresh()
        self.walk.later = later
        holders = graph.find_nodes(op="placeholder")
        (self.output,) = graph.find_nodes(op="output")
        self.ins = tuple(
            self.walk.enter(holder, marks, None)
            for holder, marks in zip(holders, ins, strict=True)
        )
        for holder, value in zip(holders, values, strict=True):
            self.walk.values[holder].varies = value.varies
        for node in graph.nodes:
            if node.op == "call_function":
                self.walk.visit(node)

    def results(self) -> list[Value]:
        """What the graph returns."""
        return [self.walk.values[x] for x in self.output.args[0]]

    def varies(self) -> list[frozenset[str]]:
        """Over which axes the results are each rank's own."""
        return [value.varies for value in self.results()]

    def only_moved_to(self, k: int) -> Marks | None:
        """Where an input is brought in every run, if that is all that is done with it: once,
        before the loop, will do.
        """
        slot = self.ins[k]
        readers = [step for step in self.walk.steps if slot in step.read]
        targets = {
            step.target.marks if isinstance(step, steps.Redistribute) else None
            for step in readers
        }
        if len(targets) != 1:
            return None
        (marks,) = targets
        if marks is None or is_partial(marks):
            return None
        return None if any(layout.halo(m) != (0, 0) for m in marks) else marks

    def finished(self, outs: Sequence[Marks]) -> steps.Plan:
        """The plan, once it is known how the results leave."""
        pairs = zip(self.output.args[0], outs, strict=True)
        slots = tuple(
            self.walk.redistribute(
                self.walk.values[x], marks, self.output, implicit=True
            )
            for x, marks in pairs
        )
        needed = steps.needed(self.walk.steps, slots)
        return steps.Plan(
            self.walk.axes,
            needed,
            self.ins,
            slots,
            tuple(self.walk.gradients.values()),
        )


@attrs.frozen(eq=False)
class LoopBody:
    """The body of a loop as its placements are sought.

    A body takes constants, carries and per-step inputs, and returns carries and per-step
    outputs.
    """

    walk: Walk  # over the graph that the loop stands in
    node: torch.fx.Node  # the loop
    graph: torch.fx.Graph
    init: Sequence[Value]  # of the carries
    inputs: list[Marks]  # of the per-step inputs
    values: list[Value]  # everything that the loop reads

    def inside(
        self,
        consts: list[Marks],
        carries: list[Marks],
        later: Collection[torch.fx.Node],
    ) -> Inside:
        """A walk over the body with its constants and carries at these placements."""
        ins = [*consts, *carries, *self.inputs]
        return Inside(self.walk, self.graph, ins, self.values, later)


class FixedPoint(NamedTuple):
    """Placements that a run leaves as it found them."""

    carries: list[Marks]
    consts: list[Marks]
    inner: Inside  # the walk with these placements


class Settled(NamedTuple):
    """How a loop is placed."""

    carries: list[Marks]
    consts: list[Marks]
    inner: Inside
    after: dict[int, Marks]  # where results that are Partial go after the loop


def settle(body: LoopBody, consts: list[Marks]) -> Settled:
    """Find the fixed point of the placements of a loop, and which gradients stay Partial in it.

    A carry that starts as zeros may be a Partial sum throughout: what a loop adds up is reduced
    once, after it. Gradients that are added to such a carry, or returned as per-step outputs,
    are not reduced in a run.
    """
    zeros = [_is_zeros(value) for value in body.init]
    later = deferred.deferrable(body.graph, len(consts), zeros)
    holders = body.graph.find_nodes(op="placeholder")
    around = dict(zip(holders, consts, strict=False))
    while True:
        point = fixed_point(body, consts, later)
        after = deferred.placements(point.inner.walk, later, around)
        terms = {
            gradient: natural(point.inner.walk.values[gradient], body.walk.axes)
            for gradient in later
        }
        misplaced = {
            later[gradient]
            for gradient, marks in terms.items()
            if not _may_wait(marks, later[gradient], point.carries, after)
        }
        if not misplaced:
            partial = {later[g] for g, marks in terms.items() if is_partial(marks)}
            return Settled(*point, _after_loop(after, partial, len(point.carries)))
        later = {g: k for g, k in later.items() if k not in misplaced}


def _may_wait(
    marks: Marks, k: int, carries: list[Marks], after: Mapping[int, Marks]
) -> bool:
    """Whether a gradient that is a term of result k may stay Partial until the loop is over."""
    if k < len(carries):
        return deferred.stays_partial(marks, carries[k])
    return deferred.stays_replicated(marks, after[k])


def _after_loop(
    after: Mapping[int, Marks], partial: Collection[int], carries: int
) -> dict[int, Marks]:
    """Where the Partial results go after the loop: carries as they are, per-step outputs
    stacked.
    """
    return {
        k: marks if k < carries else stacked(marks)
        for k, marks in after.items()
        if k in partial
    }


def fixed_point(
    body: LoopBody, consts: list[Marks], later: Collection[torch.fx.Node]
) -> FixedPoint:
    """The fixed point of the placements of carries and constants.

    Args:
        body: of the loop.
        consts: the placements of the constants around the loop.
        later: gradients that stay Partial.
    """
    axes, init = body.walk.axes, body.init
    carries = [_first_try(value, body.walk) for value in init]
    inner = body.inside(consts, carries, later)
    for _ in range(ROUNDS):
        results = inner.results()[: len(carries)]
        left = [natural(result, axes) for result in results]
        _refuse_changed(body, carries, left, len(consts))
        entering = [
            _entering(value, carry, after)
            for value, carry, after in zip(init, carries, left, strict=True)
        ]
        hoisted = [
            inner.only_moved_to(k) or marks for k, marks in enumerate(consts)
        ]
        if (entering, hoisted) == (carries, consts):
            break
        carries, consts = entering, hoisted
        inner = body.inside(consts, carries, later)
    return FixedPoint(carries, consts, inner)


def _is_zeros(value: Value) -> bool:
    return value.fill is not None and value.fill[1] == 0


def _first_try(init: Value, walk: Walk) -> Marks:
    """How a carry enters at first: zeros as a Partial sum, which a run that does more than add
    to it reduces.
    """
    if _is_zeros(init):
        return tuple(
            "R" if name in init.varies else "sum" for name in walk.axes.names
        )
    return plain(natural(init, walk.axes))


def _entering(init: Value, marks: Marks, left: Marks) -> Marks:
    """How a carry is to enter, given how a run leaves it: as that, where it can be had before
    the first run.
    """
    zeros = _is_zeros(init)
    wanted = [
        m if m not in PENDING or (zeros and m == "sum") else old
        for m, old in zip(left, marks, strict=True)
    ]
    pending = {m for m in wanted if m in PENDING}
    return marks if len(pending) > 1 else plain(tuple(wanted))


def _refuse_changed(
    body: LoopBody, carries: list[Marks], left: list[Marks], first: int
) -> None:
    """Refuse a carry that the function constrains to another placement than it was given."""
    (output,) = body.graph.find_nodes(op="output")
    starts = args_of(body.node)[first : first + len(carries)]
    rows = zip(output.args[0], starts, body.init, carries, left, strict=False)
    for k, (result, start, value, before, after) in enumerate(rows):
        asked = _is_constrained(result) and value.fill is None
        committed = start.op == "placeholder" or _is_constrained(start)
        changed = before != after and natural(value, body.walk.axes) == before
        if asked and committed and changed:
            raise _changed(body, k, result, before, after)


def _is_constrained(node: torch.fx.Node) -> bool:
    return getattr(node.target, "_opname", "") == CONSTRAIN


def _changed(
    body: LoopBody, k: int, result: torch.fx.Node, before: Marks, after: Marks
) -> PlacementError:
    """The error for a carry that enters at one placement and leaves at another."""
    axes, source = body.walk.axes, result.meta.get("source")
    fix = (
        "constrain what enters the loop to the placement with which the function leaves it, or "
        "drop the constraint inside"
    )
    got = (
        f"carry {k} enters placed {describe(before, axes)} and leaves placed "
        f"{describe(after, axes)}"
    )
    text = problem(
        f"{body.walk.name}, {body.node.target}",
        got,
        needed="one placement for every run",
        fix=fix,
        source=source,
    )
    return PlacementError(text, placements=after, source=source, fix=fix)


def natural(value: Value, axes: MeshAxes) -> Marks:
    """A value's placement as it fell, Partial sums included."""
    if value.fill is not None and not value.slots:
        return ("R",) * len(axes.sizes)
    return tuple(
        layout.without_halo(m) if isinstance(m, tuple) else m
        for m in next(iter(value.slots))
    )


def plain(marks: Marks) -> Marks:
    """In plain chunks: what enters a loop again and again is not cut in units."""
    return tuple(layout.cut_of(m)[0] if isinstance(m, tuple) else m for m in marks)


def shifted(mark: Mark, by: int) -> Mark:
    """The placement where `by` dims are put before the sharded one."""
    cut = layout.split(mark)
    return mark if cut is None else layout.joined(cut[0] + by, cut[1])


def stacked(marks: Marks) -> Marks:
    """The placement of rows, stacked, of which each is placed so."""
    return tuple(shifted(m, 1) for m in marks)
