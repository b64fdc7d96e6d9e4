"""The carries of a loop: the fixed point of their placements."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import attrs
import torch

from ....errors import PlacementError
from ....ops.nodes import args_of
from ....ops.placement import REDISTRIBUTE
from ....placement import describe
from ....types import PENDING, Mark, Marks, MeshAxes
from ... import layout
from ... import plan as steps
from ..partial.accumulated import accumulated
from ..values import Value, is_partial
from ..walk import Walk
from . import deferred

ROUNDS = 6  # after this many walks over a loop's graph, its carries are redistributed in every step


class Inside:
    """A walk over the graph of a loop, with given input placements.

    Args:
        around: the walk over the graph that has the loop.
        graph: one of the loop's.
        ins: the placements of its inputs.
        values: the values that enter the loop.
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
            self.walk.enter(holder, marks, None) for holder, marks in zip(holders, ins, strict=True)
        )
        for holder, value in zip(holders, values, strict=True):
            self.walk.values[holder].varies = value.varies
            self.walk.values[holder].early = value.early
        for node in graph.nodes:
            if node.op == "call_function":
                self.walk.visit(node)

    def results(self) -> list[Value]:
        """The results of the graph."""
        return [self.walk.values[x] for x in self.output.args[0]]

    def varies(self) -> list[frozenset[str]]:
        """The axes over which the results vary."""
        return [value.varies for value in self.results()]

    def only_moved_to(self, k: int) -> Marks | None:
        """The placement to which every step redistributes an input, if that is its only use.
        Then it is redistributed once, before the loop.
        """
        slot = self.ins[k]
        readers = [step for step in self.walk.steps if slot in step.read]
        targets = {
            step.target.marks if isinstance(step, steps.Redistribute) else None for step in readers
        }
        if len(targets) != 1:
            return None
        (marks,) = targets
        if marks is None or is_partial(marks):
            return None
        return None if any(layout.halo(m) != (0, 0) for m in marks) else marks

    def finished(self, outs: Sequence[Marks]) -> steps.Plan:
        """The plan, given the placements of the results."""
        pairs = zip(self.output.args[0], outs, strict=True)
        slots = tuple(
            self.walk.redistribute(self.walk.values[x], marks, self.output, implicit=True)
            for x, marks in pairs
        )
        gradients = [gradient.slot for gradient in self.walk.gradients.values()]
        wide = accumulated(self.walk.steps, gradients, self.walk.axes, self.walk.slot)
        needed = steps.needed(wide, slots)
        return steps.Plan(
            self.walk.axes, needed, self.ins, slots, tuple(self.walk.gradients.values())
        )


@attrs.frozen(eq=False)
class LoopBody:
    """The body of a loop, during the search for its placements.

    A body takes constants, carries and per-step inputs, and returns carries and per-step
    outputs.
    """

    walk: Walk  # the walk over the graph that has the loop
    node: torch.fx.Node  # the loop
    graph: torch.fx.Graph
    init: Sequence[Value]  # of the carries
    inputs: list[Marks]  # of the per-step inputs
    values: list[Value]  # the inputs of the loop

    def inside(
        self, consts: list[Marks], carries: list[Marks], later: Collection[torch.fx.Node]
    ) -> Inside:
        """A walk over the body with its constants and carries at these placements."""
        ins = [*consts, *carries, *self.inputs]
        return Inside(self.walk, self.graph, ins, self.values, later)


class FixedPoint(NamedTuple):
    """A fixed point: placements that a step does not change."""

    carries: list[Marks]
    consts: list[Marks]
    inner: Inside  # the walk with these placements


class Settled(NamedTuple):
    """The placements of a loop."""

    carries: list[Marks]
    consts: list[Marks]
    inner: Inside
    after: dict[int, Marks]  # the placements of Partial results after the loop


def settle(body: LoopBody, consts: list[Marks]) -> Settled:
    """Find the fixed point of the placements of a loop, and the gradients that stay Partial in
    it.

    A carry that starts as zeros may be a Partial sum throughout: a value accumulated in a loop
    is reduced once, after it. Gradients that are added to such a carry, or returned as per-step
    outputs, are not reduced in a step.
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


def _may_wait(marks: Marks, k: int, carries: list[Marks], after: Mapping[int, Marks]) -> bool:
    """Whether a gradient that is a term of result k may stay Partial until the end of the loop."""
    if k < len(carries):
        return deferred.stays_partial(marks, carries[k])
    return deferred.stays_replicated(marks, after[k])


def _after_loop(
    after: Mapping[int, Marks], partial: Collection[int], carries: int
) -> dict[int, Marks]:
    """The placements of Partial results after the loop: those of carries, and those of stacked
    per-step outputs.
    """
    return {
        k: marks if k < carries else stacked(marks) for k, marks in after.items() if k in partial
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
    axes = body.walk.axes
    init = body.init
    carries = [_first_try(value, body.walk) for value in init]
    inner = body.inside(consts, carries, later)
    for _ in range(ROUNDS):
        results = inner.results()[: len(carries)]
        left = [natural(result, axes) for result in results]
        _refuse_changed(body, carries, left, len(consts))
        entering = [
            _entering(value, carry, after, body.walk)
            for value, carry, after in zip(init, carries, left, strict=True)
        ]
        hoisted = [inner.only_moved_to(k) or marks for k, marks in enumerate(consts)]
        if (entering, hoisted) == (carries, consts):
            break
        carries = entering
        consts = hoisted
        inner = body.inside(consts, carries, later)
    for value, marks in zip(init, carries, strict=True):
        if not is_partial(marks):
            body.walk.carried[tuple(value.fake.shape)] = marks
    return FixedPoint(carries, consts, inner)


def _is_zeros(value: Value) -> bool:
    return value.fill is not None and value.fill[1] == 0


def _first_try(init: Value, walk: Walk) -> Marks:
    """The first guess for a carry. Zeros are a Partial sum; a step that does more than add to
    it reduces it.
    """
    if _is_zeros(init):
        return tuple("R" if name in init.varies else "sum" for name in walk.axes.names)
    return advised(init, walk) or plain(natural(init, walk.axes))


def advised(init: Value, walk: Walk) -> Marks | None:
    """The placements that a plan of all ops has for a carry, if it has some."""
    return walk.advice.carries.get(tuple(init.fake.shape))


def _entering(init: Value, marks: Marks, left: Marks, walk: Walk) -> Marks:
    """The placements with which a carry enters: those with which a step leaves it, if they are
    possible before the first step.
    """
    if advised(init, walk) == marks:
        return marks
    zeros = _is_zeros(init)
    wanted = [
        m if m not in PENDING or (zeros and m == "sum") else old
        for m, old in zip(left, marks, strict=True)
    ]
    pending = {m for m in wanted if m in PENDING}
    return marks if len(pending) > 1 else plain(tuple(wanted))


def _refuse_changed(body: LoopBody, carries: list[Marks], left: list[Marks], first: int) -> None:
    """Refuse a carry that the function constrains to a placement that differs from its initial
    one.
    """
    (output,) = body.graph.find_nodes(op="output")
    starts = args_of(body.node)[first : first + len(carries)]
    rows = zip(output.args[0], starts, body.init, carries, left, strict=False)
    for k, (result, start, value, before, after) in enumerate(rows):
        asked = result.target is REDISTRIBUTE and value.fill is None
        committed = start.op == "placeholder" or start.target is REDISTRIBUTE
        changed = before != after and natural(value, body.walk.axes) == before
        if asked and committed and changed:
            raise _changed(body, k, result, before, after)


def _changed(
    body: LoopBody, k: int, result: torch.fx.Node, before: Marks, after: Marks
) -> PlacementError:
    """The error for a carry that enters at one placement and leaves at another."""
    axes = body.walk.axes
    source = result.meta.get("source")
    fix = (
        "constrain the initial carry to the placement with which the function returns it, or "
        "drop the constraint inside"
    )
    got = (
        f"carry {k} enters placed {describe(before, axes)} and leaves placed "
        f"{describe(after, axes)}"
    )
    return PlacementError.of(
        f"{body.walk.name}, {body.node.target}",
        got,
        needed="one placement for every step",
        fix=fix,
        source=source,
        placements=after,
    )


def natural(value: Value, axes: MeshAxes) -> Marks:
    """A value's placements from propagation, including Partial sums."""
    if value.is_unmade:
        return ("R",) * len(axes.sizes)
    return tuple(
        layout.without_halo(m) if isinstance(m, tuple) else m for m in next(iter(value.slots))
    )


def plain(marks: Marks) -> Marks:
    """The placements in plain chunks, without units, for a value that re-enters a loop."""
    return tuple(layout.cut_of(m)[0] if isinstance(m, tuple) else m for m in marks)


def shifted(mark: Mark, by: int) -> Mark:
    """The placements after `by` dims are inserted before the sharded one."""
    cut = layout.split(mark)
    if cut is None:
        return mark
    return layout.joined(cut[0] + by, cut[1], outer=layout.outer_of(mark))


def stacked(marks: Marks) -> Marks:
    """The placements of stacked slices that each have these placements."""
    return tuple(shifted(m, 1) for m in marks)
