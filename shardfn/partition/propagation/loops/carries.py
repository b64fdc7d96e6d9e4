"""The carries of a loop: the fixed point of their placements."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import attrs
import torch

from ....errors import PlacementError
from ....ops.nodes import args_of, origin_of
from ....ops.placement import REDISTRIBUTE
from ....placement import describe
from ....types import PARTIAL_KINDS, AxisPlacement, MeshAxes, MeshPlacements
from ... import layout
from ... import plan as steps
from ..partial.reduce_in_float32 import reduced_in_float32
from ..values import Value, is_partial
from ..walk import Walk
from . import deferred_reductions

ROUNDS = 6  # after this many walks over a loop's graph, its carries are redistributed in every step


class BodyWalk:
    """A walk over the body of a loop or branch, with given placements of its inputs.

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
        ins: Sequence[MeshPlacements],
        values: Sequence[Value],
        later: Collection[torch.fx.Node] = (),
    ) -> None:
        self.walk = around.fresh()
        self.walk.later = later
        holders = graph.find_nodes(op="placeholder")
        (self.output,) = graph.find_nodes(op="output")
        self.ins = tuple(
            self.walk.enter(holder, placements, None)
            for holder, placements in zip(holders, ins, strict=True)
        )
        for holder, value in zip(holders, values, strict=True):
            self.walk.values[holder].varies = value.varies
            self.walk.values[holder].early = value.early
        for node in graph.nodes:
            if node.op == "call_function":
                self.walk.visit(node)

    def results(self) -> list[Value]:
        """Return the values that the body returns."""
        return [self.walk.values[x] for x in self.output.args[0]]

    def varies(self) -> list[frozenset[str]]:
        """Return the mesh axes over which each result varies."""
        return [value.varies for value in self.results()]

    def only_moved_to(self, k: int) -> MeshPlacements | None:
        """Return the placement to which every step redistributes an input, so that it moves
        once before the loop.
        """
        slot = self.ins[k]
        readers = [step for step in self.walk.steps if slot in step.read]
        targets = {
            step.target.placements if isinstance(step, steps.Redistribute) else None
            for step in readers
        }
        if len(targets) != 1:
            return None
        (placements,) = targets
        if placements is None or is_partial(placements):
            return None
        return None if any(layout.halo(m) != (0, 0) for m in placements) else placements

    def finished(self, outs: Sequence[MeshPlacements]) -> steps.Plan:
        """Return the plan of the body, with its results at some placements."""
        pairs = zip(self.output.args[0], outs, strict=True)
        slots = tuple(
            self.walk.redistribute(self.walk.values[x], placements, self.output, implicit=True)
            for x, placements in pairs
        )
        gradients = [gradient.slot for gradient in self.walk.gradients.values()]
        wide = reduced_in_float32(self.walk.steps, gradients, self.walk.axes, self.walk.slot)
        needed = steps.needed(wide, slots)
        return steps.Plan(
            self.walk.axes, needed, self.ins, slots, tuple(self.walk.gradients.values())
        )


@attrs.frozen(eq=False)
class LoopBody:
    """A loop whose body is walked again and again until its placements are stable.

    A body takes constants, carries and per-step inputs, and returns carries and per-step
    outputs.
    """

    walk: Walk  # the walk over the graph that has the loop
    node: torch.fx.Node  # the loop
    graph: torch.fx.Graph
    init: Sequence[Value]  # of the carries
    inputs: list[MeshPlacements]  # of the per-step inputs
    values: list[Value]  # the inputs of the loop

    def inside(
        self,
        consts: list[MeshPlacements],
        carries: list[MeshPlacements],
        later: Collection[torch.fx.Node],
    ) -> BodyWalk:
        """Walk the body with constants and carries at these placements."""
        ins = [*consts, *carries, *self.inputs]
        return BodyWalk(self.walk, self.graph, ins, self.values, later)


class FixedPoint(NamedTuple):
    """Placements of carries and constants that a step of the loop does not change."""

    carries: list[MeshPlacements]
    consts: list[MeshPlacements]
    inner: BodyWalk  # the walk with these placements


class StablePlacements(NamedTuple):
    """The final placements of a loop, and those of Partial results right after it."""

    carries: list[MeshPlacements]
    consts: list[MeshPlacements]
    inner: BodyWalk
    after: dict[int, MeshPlacements]  # the placements of Partial results after the loop


def stable_placements(body: LoopBody, consts: list[MeshPlacements]) -> StablePlacements:
    """Find the placements of a loop at which carries leave a step as they enter it, and which
    gradients stay Partial.

    A carry that starts as zeros may be a Partial sum throughout: a value accumulated in a loop
    is reduced once, after it. Gradients that are added to such a carry, or returned as per-step
    outputs, are not reduced in a step.
    """
    zeros = [_is_zeros(value) for value in body.init]
    later = deferred_reductions.deferrable(body.graph, len(consts), zeros)
    holders = body.graph.find_nodes(op="placeholder")
    around = dict(zip(holders, consts, strict=False))
    while True:
        point = fixed_point(body, consts, later)
        after = deferred_reductions.placements(point.inner.walk, later, around)
        terms = {
            gradient: propagated(point.inner.walk.values[gradient], body.walk.axes)
            for gradient in later
        }
        misplaced = {
            later[gradient]
            for gradient, placements in terms.items()
            if not _may_wait(placements, later[gradient], point.carries, after)
        }
        if not misplaced:
            partial = {later[g] for g, placements in terms.items() if is_partial(placements)}
            return StablePlacements(*point, _after_loop(after, partial, len(point.carries)))
        later = {g: k for g, k in later.items() if k not in misplaced}


def _may_wait(
    placements: MeshPlacements,
    k: int,
    carries: list[MeshPlacements],
    after: Mapping[int, MeshPlacements],
) -> bool:
    """Return whether a gradient may stay Partial until the end of the loop."""
    if k < len(carries):
        return deferred_reductions.stays_partial(placements, carries[k])
    return deferred_reductions.stays_replicated(placements, after[k])


def _after_loop(
    after: Mapping[int, MeshPlacements], partial: Collection[int], carries: int
) -> dict[int, MeshPlacements]:
    """Return the placements after the loop of results that stay Partial in it."""
    return {
        k: placements if k < carries else stacked(placements)
        for k, placements in after.items()
        if k in partial
    }


def fixed_point(
    body: LoopBody, consts: list[MeshPlacements], later: Collection[torch.fx.Node]
) -> FixedPoint:
    """Walk the body until the placements of its carries no longer change.

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
        left = [propagated(result, axes) for result in results]
        _refuse_changed(body, carries, left, len(consts))
        entering = [
            _entering(value, carry, after, body.walk)
            for value, carry, after in zip(init, carries, left, strict=True)
        ]
        hoisted = [inner.only_moved_to(k) or placements for k, placements in enumerate(consts)]
        if (entering, hoisted) == (carries, consts):
            break
        carries = entering
        consts = hoisted
        inner = body.inside(consts, carries, later)
    for value, placements in zip(init, carries, strict=True):
        if not is_partial(placements):
            body.walk.carried[tuple(value.fake.shape)] = placements
    return FixedPoint(carries, consts, inner)


def _is_zeros(value: Value) -> bool:
    """Return whether a value is a constant 0."""
    return value.fill is not None and value.fill[1] == 0


def _first_try(init: Value, walk: Walk) -> MeshPlacements:
    """Guess the placements of a carry: zeros may be a Partial sum."""
    if _is_zeros(init):
        closed = {*init.varies, *walk.axes.closed}
        return tuple("R" if name in closed else "sum" for name in walk.axes.names)
    return advised_carry(init, walk) or plain(propagated(init, walk.axes))


def advised_carry(init: Value, walk: Walk) -> MeshPlacements | None:
    """Return the carry placements that the planner chose, if it chose any."""
    return walk.advice.carries.get(tuple(init.fake.shape))


def _entering(
    init: Value, placements: MeshPlacements, left: MeshPlacements, walk: Walk
) -> MeshPlacements:
    """Return the placements with which a carry enters: those with which a step leaves it, where
    possible.
    """
    if advised_carry(init, walk) == placements:
        return placements
    zeros = _is_zeros(init)
    wanted = [
        m if m not in PARTIAL_KINDS or (zeros and m == "sum") else old
        for m, old in zip(left, placements, strict=True)
    ]
    reductions = {m for m in wanted if m in PARTIAL_KINDS}
    return placements if len(reductions) > 1 else plain(tuple(wanted))


def _refuse_changed(
    body: LoopBody, carries: list[MeshPlacements], left: list[MeshPlacements], first: int
) -> None:
    """Raise an error for a carry that is constrained to other placements than it starts with."""
    (output,) = body.graph.find_nodes(op="output")
    starts = args_of(body.node)[first : first + len(carries)]
    rows = zip(output.args[0], starts, body.init, carries, left, strict=False)
    for k, (result, start, value, before, after) in enumerate(rows):
        asked = result.target is REDISTRIBUTE and value.fill is None
        committed = start.op == "placeholder" or start.target is REDISTRIBUTE
        changed = before != after and propagated(value, body.walk.axes) == before
        if asked and committed and changed:
            raise _changed(body, k, result, before, after)


def _changed(
    body: LoopBody, k: int, result: torch.fx.Node, before: MeshPlacements, after: MeshPlacements
) -> PlacementError:
    """Make the error for a carry that enters and leaves a step at different placements."""
    axes = body.walk.axes
    fix = (
        "constrain the initial carry to the placement of the returned carry, or remove the "
        "constraint inside the body"
    )
    got = (
        f"carry {k} enters a step placed {describe(before, axes)} and leaves it placed "
        f"{describe(after, axes)}"
    )
    return PlacementError.of(
        f"{body.walk.name}, {body.node.target}",
        got,
        needed="the same placement of the carry in every step",
        fix=fix,
        **origin_of(result),
        placements=after,
    )


def propagated(value: Value, axes: MeshAxes) -> MeshPlacements:
    """Return the placements that propagation gave a value, Partial included, without halos."""
    if value.is_unmade:
        return ("R",) * len(axes.sizes)
    return tuple(
        layout.without_halo(m) if isinstance(m, tuple) else m for m in next(iter(value.slots))
    )


def plain(placements: MeshPlacements) -> MeshPlacements:
    """Drop the units of shards, for a value that re-enters a loop in plain chunks, or in those of
    the zigzag that a `P` says.
    """
    turning = {m[0] for m in placements if isinstance(m, tuple) and m[1:] == (1, -2)}
    return tuple(
        m
        if isinstance(m, str) or layout.dim_and_unit(m)[0] in turning
        else layout.dim_and_unit(m)[0]
        for m in placements
    )


def shifted(placement: AxisPlacement, by: int) -> AxisPlacement:
    """Shift the sharded dim of a placement by some dims."""
    cut = layout.split(placement)
    if cut is None:
        return placement
    return layout.joined(cut[0] + by, cut[1], outer=layout.blocks(placement))


def stacked(placements: MeshPlacements) -> MeshPlacements:
    """Return the placements of a stack of tensors that each have these placements."""
    return tuple(shifted(m, 1) for m in placements)
