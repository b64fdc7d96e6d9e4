"""The price of a plan: what its collectives send, and what its ops compute on the busiest rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import attrs
import torch
from torch.fx import Graph, Node

from ...collectives import HALO, PPERMUTE
from ...ops.loops import loop_of
from ...ops.placement import ALIGN
from ...types import MeshAxes
from .. import layout, plan
from ..collective_bytes import nbytes as payload_bytes
from ..redistribute import Move, local_bytes, price
from . import op_cost
from .share import share_of
from .start_costs import parameter_slots, with_start_costs

OpPrice = Callable[[Node], float]
LESS = 0.9  # of what the first plan sends, below which another one is followed
# Of plans that take about the same time, those that send the fewest bytes are taken.
ABOUT = 1.05


@attrs.frozen
class PlanPrice:
    """The price of a plan, in bytes over the fastest axis.

    Args:
        sent: of its collectives, with the time that each takes to start.
        nbytes: of its collectives.
        computed: of its ops: the bytes that a rank could send meanwhile.
    """

    sent: float
    nbytes: float
    computed: float

    @property
    def total(self) -> float:
        """The price of one step in which nothing overlaps."""
        return self.sent + self.computed

    def is_below(self, other: PlanPrice) -> bool:
        """Return whether this plan sends clearly less than another, in no more time."""
        is_faster = self.sent < LESS * other.sent
        sends_less = self.nbytes < LESS * other.nbytes
        return is_faster and sends_less and self.total < ABOUT * other.total

    def is_faster(self, other: PlanPrice) -> bool:
        """Return whether this plan takes clearly less time than another."""
        return self.total * ABOUT < other.total

    def plus(self, other: PlanPrice, times: int) -> PlanPrice:
        """Add another price so many times."""
        return PlanPrice(
            self.sent + times * other.sent,
            self.nbytes + times * other.nbytes,
            self.computed + times * other.computed,
        )


def plan_price(chosen: plan.Plan, graph: Graph, of_op: OpPrice = op_cost.in_bytes) -> PlanPrice:
    """Price a plan: its collectives and its compute. Steps of a scan count as often as they run.

    Args:
        chosen: the plan.
        graph: of its program.
        of_op: the price of an op on one device.
    """
    axes = chosen.axes
    ahead = parameter_slots(chosen, graph)
    moves = list(plan.moves(chosen))
    total = PlanPrice(
        sent=sum(_sent(axes, step, move, ahead) for step, move in moves),
        nbytes=sum(_nbytes(axes, step, move) for step, move in moves),
        computed=sum(_computed(axes, step, of_op) for step in chosen.steps),
    )
    for inner, body, times in bodies_of(chosen):
        total = total.plus(plan_price(inner, body, of_op), times)
    return total


@attrs.frozen(eq=False)
class Sent:
    """One move of a plan, with what its price depends on.

    Args:
        plan: the plan.
        step: the redistribution.
        move: one of its moves.
        ahead: the slots of the plan's parameters, by number.
        ops: the steps that run ops, by node.
    """

    plan: plan.Plan
    step: plan.Sending
    move: Move
    ahead: set[int]
    ops: dict[Node, plan.Apply]

    @property
    def nbytes(self) -> float:
        """The bytes that a rank sends."""
        return _nbytes(self.plan.axes, self.step, self.move)

    @property
    def price(self) -> float:
        """The price of the move, with its start."""
        return _sent(self.plan.axes, self.step, self.move, self.ahead)

    @property
    def is_of_parameter(self) -> bool:
        """Whether the move is of a parameter."""
        return self.step.source.number in self.ahead

    @property
    def is_implicit_gather(self) -> bool:
        """Whether the move gathers a parameter that no placement of the user asks for."""
        return self.step.implicit and self.move.sends and self.is_of_parameter

    def readers(self) -> list[plan.Apply]:
        """List the ops that compute with the moved value."""
        return [self.ops[x] for x in _computing(self.step.node) if x in self.ops]


def total_of(
    chosen: plan.Plan, graph: Graph, of_move: Callable[[Sent], float], *, in_bodies: bool = True
) -> float:
    """Sum a number over the moves of a plan and of its loops, as often as these run."""
    ahead = parameter_slots(chosen, graph)
    ops = {step.node: step for step in chosen.steps if isinstance(step, plan.Apply)}
    total = sum(of_move(Sent(chosen, *pair, ahead, ops)) for pair in plan.moves(chosen))
    for inner, body, times in bodies_of(chosen) if in_bodies else ():
        total += times * total_of(inner, body, of_move)
    return total


def explicit_price(chosen: plan.Plan, graph: Graph) -> float:
    """Price the collectives that placements of the user ask for: gradients and results."""
    return total_of(chosen, graph, lambda x: 0.0 if x.step.implicit else x.price)


def implicit_price(chosen: plan.Plan, graph: Graph) -> float:
    """Price the collectives that no placement asks for, other than those of parameters."""
    is_counted = lambda x: x.step.implicit and not x.is_of_parameter
    return total_of(chosen, graph, lambda x: x.price if is_counted(x) else 0.0)


def implicit_bytes(chosen: plan.Plan, graph: Graph) -> float:
    """Count the bytes of collectives that no placement asks for, other than those of parameters."""
    is_counted = lambda x: x.step.implicit and not x.is_of_parameter
    return total_of(chosen, graph, lambda x: x.nbytes if is_counted(x) else 0.0)


def partly_read_bytes(chosen: plan.Plan, graph: Graph) -> float:
    """Count the bytes of parameters that are gathered for ops that read a small part of them,
    such as lookups.
    """
    is_counted = lambda x: x.is_implicit_gather and _reads_part(x.step.node, x.step.source.value)
    return total_of(chosen, graph, lambda x: x.nbytes if is_counted(x) else 0.0, in_bodies=False)


def redundantly_read_bytes(chosen: plan.Plan, graph: Graph) -> float:
    """Count the bytes of parameters that are gathered over an axis whose ranks all compute the
    same.
    """

    def of_move(x: Sent) -> float:
        readers = x.readers() if x.is_implicit_gather else []
        is_counted = readers and all(_is_replicated(step, x.move.axis) for step in readers)
        return x.nbytes if is_counted else 0.0

    return total_of(chosen, graph, of_move)


def thin_bytes(chosen: plan.Plan, graph: Graph) -> float:
    """Count the bytes of parameters that are gathered for ops with smaller inputs or results."""

    def of_move(x: Sent) -> float:
        if not x.is_implicit_gather:
            return 0.0
        slots = [slot for step in x.readers() for slot in (*step.ins, *step.outs)]
        others = [_on_a_rank(x.plan.axes, s) for s in slots if s.number not in x.ahead]
        is_thin = _on_a_rank(x.plan.axes, x.step.source) > min(others, default=math.inf)
        return x.nbytes if is_thin else 0.0

    return total_of(chosen, graph, of_move)


def _on_a_rank(axes: MeshAxes, slot: plan.Slot) -> float:
    """Return the bytes of a value on one rank."""
    return local_bytes(op_cost.nbytes(slot.value), slot.placements, axes.sizes, without=-1)


def _computing(node: Node) -> Iterator[Node]:
    """Yield a node, or the readers of it that compute if it is a view."""
    if node.op != "call_function" or not op_cost.is_alias(node):
        yield node
        return
    for user in node.users:
        yield from _computing(user)


def _is_replicated(step: plan.Apply, axis: int) -> bool:
    """Return whether all ranks of an axis run the same op on the same values."""
    return all(slot.placements[axis] == "R" for slot in (*step.ins, *step.outs))


def _reads_part(node: Node, value: torch.Tensor) -> bool:
    """Return whether an op may read less than half of a value."""
    made = op_cost.nbytes(node.meta.get("val"))
    is_product = op_cost.flops(node) > 0
    return not op_cost.is_alias(node) and not is_product and 2 * made < op_cost.nbytes(value)


def bodies_of(chosen: plan.Plan) -> Iterator[tuple[plan.Plan, Graph, int]]:
    """Yield the plans inside a plan, with their graphs and how often they run."""
    for step in chosen.steps:
        if isinstance(step, plan.Nested):
            loop = loop_of(step.node)
            times = op_cost.turns(loop)
            for inner, body in zip(step.bodies, loop.graphs, strict=True):
                yield inner, body, times


def _sent(axes: MeshAxes, step: plan.Sending, move: Move, ahead: set[int]) -> float:
    """Price one move, with the time that it takes to start."""
    if not move.sends:
        return _price(axes, step, move)
    is_ahead = step.source.number in ahead or step.node.target is ALIGN
    return _price(with_start_costs(axes, is_ahead=is_ahead), step, move)


def _nbytes(axes: MeshAxes, step: plan.Sending, move: Move) -> float:
    """Return the bytes that a rank sends in one move."""
    return _price(attrs.evolve(axes, costs=()), step, move) if move.sends else 0.0


def _price(axes: MeshAxes, step: plan.Sending, move: Move) -> float:
    """Price one move by its kind, its local bytes and the cost of its axis."""
    value = step.source.value
    if move.rows is not None:
        nbytes = payload_bytes(value.shape, value.element_size(), move, axes)
    else:
        # a permute sends what a rank has, other collectives a share of what all have
        without = -1 if move.kind == PPERMUTE else move.axis
        nbytes = local_bytes(op_cost.nbytes(value), move.before, axes.sizes, without)
    if move.kind == HALO:
        nbytes *= layout.halo_share(value.shape, move.after[move.axis])
    return price(move.kind, nbytes, axes.sizes[move.axis], axes.cost(move.axis))


def _computed(axes: MeshAxes, step: plan.Step, of_op: OpPrice) -> float:
    """Price an op on the busiest rank."""
    if not isinstance(step, plan.Apply):
        return 0.0
    slots = [(slot.value, slot.placements) for slot in (*step.outs, *step.ins)]
    found = of_op(step.node)
    for axis in range(len(axes.sizes)):
        found *= share_of(slots, axes.sizes, axis)
    return found
