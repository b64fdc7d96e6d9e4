"""Stage 2, first half: choose a placement for every value of a Program.

All of this is equal on all ranks, since it depends only on global shapes and on the mesh's
sizes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import attrs

from ..types import MeshAxes, MeshPlacements, Program
from . import plan
from .auto import fused_op_cost
from .planner.inline_loops import inlined
from .planner.observed_walk import ObservedWalk
from .planner.plan_price import (
    ABOUT,
    PlanPrice,
    implicit_bytes,
    partly_read_bytes,
    plan_price,
    redundantly_read_bytes,
    thin_bytes,
)
from .planner.search_carries import Carries, is_better, search_carries
from .planner.solve_axes import solve_axes
from .planner.start_costs import with_links
from .propagation import handlers  # noqa: F401  it fills the table of the walk
from .propagation.partial.reduce_in_float32 import reduced_in_float32
from .propagation.values import EARLY, NO_ADVICE, Advice
from .propagation.walk import Walk
from .stages import locate

GREEDY, GLOBAL = PLANNERS = ("greedy", "global")
# The bytes that nothing asked for, below which a program is not worth a plan: some microseconds.
WORTH = 16 * 2.0**20
# The bytes that a plan of all ops may spare.
SPARED = (implicit_bytes, partly_read_bytes, redundantly_read_bytes, thin_bytes)


def propagate(
    program: Program,
    axes: MeshAxes,
    in_placements: Sequence[MeshPlacements],
    out_placements: Sequence[MeshPlacements | None],
    unreduced: Collection[int] = (),
    planner: str = GREEDY,
) -> plan.Plan:
    """Choose placements for every value of a Program: greedily, then all at once where much is
    sent.

    A first walk takes the cheapest strategy of one op at a time. Where it sends
    activations that no placement asks for, or parameters of which a part is read, with which
    all ranks compute the same or little, all ops are planned at once; that plan is taken if it
    takes clearly less time, or sends clearly less in about the time.

    Args:
        program: the Program.
        axes: names and sizes of the mesh. Axes without the costs of links have those of an
            H100's nodes.
        in_placements: the placement of each input.
        out_placements: the placement of each output. None leaves an output where propagation puts
            it.
        unreduced: the positions of inputs that are unreduced gradients. No op may reduce them
            implicitly.
        planner: "global", or "greedy" for the first walk alone.

    Returns:
        The plan.

    Raises:
        RuleError: an op that cannot be computed correctly on this mesh.
        PlacementError: an op would have to reduce an unreduced gradient, or a result cannot
            stay unreduced.
    """
    stages, inside, ins, outs = within_a_stage(program, axes, in_placements, out_placements)
    if stages is not None:
        whole = propagate(program, inside, ins, outs, unreduced, planner)
        whole = attrs.evolve(whole, axes=attrs.evolve(whole.axes, closed=()))
        return locate.located(whole, program, stages, in_placements, out_placements)
    walk = Walk(with_links(axes), program.name)
    first = run_walk(walk, program, in_placements, out_placements, unreduced)
    graph = program.graph.graph
    is_fixed = planner == GREEDY or unreduced or not axes.names
    if is_fixed:
        return first
    if all(of(first, graph) < WORTH for of in SPARED):
        return first
    before = plan_price(first, graph, fused_op_cost.in_bytes)
    search = PlanSearch(program, in_placements, first)
    second, now = search.best(walk.carried)
    if thin_bytes(first, graph) >= WORTH:
        # one op at a time, with every byte counted alike, as a start
        whole = attrs.evolve(search, early=1.0)
        other, plain = whole.followed(NO_ADVICE)
        found = [(plain, search.price_of(plain)), whole.best(other.carried)]
        second, now = min([(second, now), *found], key=lambda pair: pair[1].total)
    return second if now.is_below(before) or now.is_faster(before) else first


def within_a_stage(
    program: Program,
    axes: MeshAxes,
    in_placements: Sequence[MeshPlacements],
    out_placements: Sequence[MeshPlacements | None],
) -> tuple[int | None, MeshAxes, Sequence[MeshPlacements], Sequence[MeshPlacements | None]]:
    """Return the axis of the stages of a pipeline, if there is one, and the axes and placements of
    a walk over the program: as if that axis had one rank.
    """
    marks = [*in_placements, *out_placements]
    stages = None if axes.closed else locate.stage_axis(program, axes, marks)
    if stages is None:
        return None, axes, in_placements, out_placements
    ins = [*map(locate.without_stages, in_placements)]
    outs = [row if row is None else locate.without_stages(row) for row in out_placements]
    return stages, attrs.evolve(axes, closed=(axes.names[stages],)), ins, outs


@attrs.frozen(eq=False)
class PlanSearch:
    """The search for a plan that is cheaper than the greedy one, with results placed as that
    has them.
    """

    program: Program
    in_placements: Sequence[MeshPlacements]
    first: plan.Plan
    early: float = EARLY  # the weight of a byte of an input

    def best(self, carried: Carries) -> tuple[plan.Plan, PlanPrice]:
        """Return the cheapest plan and its price: loops planned before the ops around them, or
        together with them.
        """
        apart = self.apart(carried)
        best = apart, self.price_of(apart)
        together = self.together()
        if together is None:
            return best
        price = self.price_of(together)
        # a compiler fuses what the price counts; bytes it cannot spare
        sends_no_more = price.nbytes <= ABOUT * best[1].nbytes
        is_taken = sends_no_more and is_better(price, best[1])
        return (together, price) if is_taken else best

    def apart(self, carried: Carries) -> plan.Plan:
        """Plan the carries of loops first, then all ops around them."""
        carries = search_carries(carried, self.first.axes, self.price)
        walk, placed = self.followed(Advice({}, carries))
        ops = solve_axes(ObservedWalk(walk, self.program, placed))
        _, found = self.followed(Advice(ops, carries))
        return found

    def together(self) -> plan.Plan | None:
        """Plan all ops at once, with loops inlined. None if there are no loops."""
        flat = inlined(self.program)
        if flat.program is self.program:
            return None
        walk = Walk(self.first.axes, self.program.name, NO_ADVICE._replace(early=self.early))
        placed = run_walk(walk, flat.program, self.in_placements, self.outs, ())
        decided = solve_axes(ObservedWalk(walk, flat.program, placed, flat))
        _, found = self.followed(flat.advice(decided))
        return found

    @property
    def outs(self) -> list[MeshPlacements]:
        """The placements of the results."""
        return [slot.placements for slot in self.first.outs]

    def price_of(self, chosen: plan.Plan) -> PlanPrice:
        """Price a plan."""
        return plan_price(chosen, self.program.graph.graph, fused_op_cost.in_bytes)

    def price(self, carries: Carries) -> PlanPrice:
        """Price the program with given carry placements."""
        _, found = self.followed(Advice({}, carries))
        return self.price_of(found)

    def followed(self, advice: Advice) -> tuple[Walk, plan.Plan]:
        """Walk the program once more along some advice. Returns the walk and its plan."""
        advice = advice._replace(early=self.early)
        walk = Walk(self.first.axes, self.program.name, advice)
        found = run_walk(walk, self.program, self.in_placements, self.outs, ())
        return walk, attrs.evolve(found, advice=advice)


def run_walk(
    walk: Walk,
    program: Program,
    in_placements: Sequence[MeshPlacements],
    out_placements: Sequence[MeshPlacements | None],
    unreduced: Collection[int],
) -> plan.Plan:
    """Run one walk over a Program, and return its plan."""
    graph = program.graph.graph
    holders = graph.find_nodes(op="placeholder")
    forgotten = [path if i in unreduced else None for i, path in enumerate(program.in_paths)]
    walk.paths = dict(zip(holders, program.in_paths, strict=True))
    ins = tuple(walk.enter(*entry) for entry in zip(holders, in_placements, forgotten, strict=True))
    (output,) = graph.find_nodes(op="output")
    leaving = zip(output.args[0], out_placements, strict=True)
    walk.leaving = {node: placements for node, placements in leaving if placements is not None}
    for node in graph.nodes:
        if node.op == "call_function":
            walk.visit(node)
    outs = tuple(
        walk.leave(*leaving, output)
        for leaving in zip(output.args[0], out_placements, program.out_paths, strict=True)
    )
    gradients = [gradient.slot for gradient in walk.gradients.values()]
    steps = reduced_in_float32(walk.steps, gradients, walk.axes, walk.slot)
    needed = plan.needed(steps, outs)
    return plan.Plan(
        walk.axes,
        needed,
        ins,
        outs,
        tuple(walk.gradients.values()),
        tuple(walk.unreduced),
        tuple(sorted(walk.cotangents.items())),
    )
