"""The price of a plan: what its collectives send, and what its ops compute on the busiest rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import attrs
import torch
from torch.fx import Graph, Node

from ...collectives import HALO
from ...ops.loops import loop_of
from ...ops.placement import ALIGN
from ...types import MeshAxes
from .. import layout, plan
from ..redistribute import Move, local_bytes, price
from . import work
from .share import share_of
from .starts import parameter_slots, timed

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
        """Whether it sends clearly less, and takes no more than about the time."""
        is_faster = self.sent < LESS * other.sent
        sends_less = self.nbytes < LESS * other.nbytes
        return is_faster and sends_less and self.total < ABOUT * other.total

    def is_faster(self, other: PlanPrice) -> bool:
        """Whether it takes clearly less time."""
        return self.total * ABOUT < other.total

    def plus(self, other: PlanPrice, times: int) -> PlanPrice:
        """The sum of this price and so many times another one."""
        return PlanPrice(
            self.sent + times * other.sent,
            self.nbytes + times * other.nbytes,
            self.computed + times * other.computed,
        )


def plan_price(chosen: plan.Plan, graph: Graph, of_op: OpPrice = work.in_bytes) -> PlanPrice:
    """The price of a plan of a graph. The steps of a scan count as often as they run.

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


def sending(chosen: plan.Plan, graph: Graph, *, is_asked: bool) -> float:
    """The price of sending what the placements of the user ask for: gradients and results; or
    what nothing asks for, other than parameters.
    """
    ahead = parameter_slots(chosen, graph)
    total = 0.0
    for step, move in plan.moves(chosen):
        if step.implicit != is_asked and (is_asked or step.source.number not in ahead):
            total += _sent(chosen.axes, step, move, ahead)
    for inner, body, times in bodies_of(chosen):
        total += times * sending(inner, body, is_asked=is_asked)
    return total


def unasked_bytes(chosen: plan.Plan, graph: Graph) -> float:
    """The bytes that a rank sends and no placement of the user asks for, other than parameters."""
    ahead = parameter_slots(chosen, graph)
    total = 0.0
    for step, move in plan.moves(chosen):
        if step.implicit and step.source.number not in ahead:
            total += _nbytes(chosen.axes, step, move)
    for inner, body, times in bodies_of(chosen):
        total += times * unasked_bytes(inner, body)
    return total


def part_read_bytes(chosen: plan.Plan, graph: Graph) -> float:
    """The bytes of parameters that are gathered for ops that read a small part of them, as the
    lookup of some rows of a table does.
    """
    ahead = parameter_slots(chosen, graph)
    total = 0.0
    for step, move in plan.moves(chosen):
        is_gathered = step.implicit and move.sends and step.source.number in ahead
        if is_gathered and _reads_part(step.node, step.source.value):
            total += _nbytes(chosen.axes, step, move)
    return total


def gathered_alike_bytes(chosen: plan.Plan, graph: Graph) -> float:
    """The bytes of parameters that are gathered over an axis for ops that all of its ranks then
    compute alike.
    """
    ahead = parameter_slots(chosen, graph)
    applied = {step.node: step for step in chosen.steps if isinstance(step, plan.Apply)}
    total = 0.0
    for step, move in plan.moves(chosen):
        is_gathered = step.implicit and move.sends and step.source.number in ahead
        if is_gathered:
            readers = [applied[x] for x in _computing(step.node) if x in applied]
            if readers and all(_is_alike(x, move.axis) for x in readers):
                total += _nbytes(chosen.axes, step, move)
    for inner, body, times in bodies_of(chosen):
        total += times * gathered_alike_bytes(inner, body)
    return total


def thin_bytes(chosen: plan.Plan, graph: Graph) -> float:
    """The bytes of parameters that are gathered for ops that read and make little, so that
    moving this might send less.
    """
    ahead = parameter_slots(chosen, graph)
    applied = {step.node: step for step in chosen.steps if isinstance(step, plan.Apply)}
    total = 0.0
    for step, move in plan.moves(chosen):
        if step.implicit and move.sends and step.source.number in ahead:
            readers = [applied[x] for x in _computing(step.node) if x in applied]
            others = [
                _on_a_rank(chosen.axes, slot)
                for x in readers
                for slot in (*x.ins, *x.outs)
                if slot.number not in ahead
            ]
            if _on_a_rank(chosen.axes, step.source) > min(others, default=math.inf):
                total += _nbytes(chosen.axes, step, move)
    for inner, body, times in bodies_of(chosen):
        total += times * thin_bytes(inner, body)
    return total


def _on_a_rank(axes: MeshAxes, slot: plan.Slot) -> float:
    """The bytes of a value that a rank has."""
    return local_bytes(work.nbytes(slot.value), slot.marks, axes.sizes, without=-1)


def _computing(node: Node) -> Iterator[Node]:
    """An op, or the ops that read it if it is a view."""
    if node.op != "call_function" or not work.is_alias(node):
        yield node
        return
    for user in node.users:
        yield from _computing(user)


def _is_alike(step: plan.Apply, axis: int) -> bool:
    """Whether all ranks of an axis compute the same."""
    return all(slot.marks[axis] == "R" for slot in (*step.ins, *step.outs))


def _reads_part(node: Node, value: torch.Tensor) -> bool:
    """Whether an op may read less than half of a value: it makes no more."""
    made = work.nbytes(node.meta.get("val"))
    is_product = work.flops(node) > 0
    return not work.is_alias(node) and not is_product and 2 * made < work.nbytes(value)


def bodies_of(chosen: plan.Plan) -> Iterator[tuple[plan.Plan, Graph, int]]:
    """The plans inside a plan, with their graphs and how often they run."""
    for step in chosen.steps:
        if isinstance(step, plan.Nested):
            loop = loop_of(step.node)
            times = work.turns(loop)
            for inner, body in zip(step.plans, loop.graphs, strict=True):
                yield inner, body, times


def _sent(axes: MeshAxes, step: plan.Redistribute, move: Move, ahead: set[int]) -> float:
    """The price of one move, with the time that it takes to start."""
    if not move.sends:
        return _price(axes, step, move)
    is_ahead = step.source.number in ahead or step.node.target is ALIGN
    return _price(timed(axes, is_ahead=is_ahead), step, move)


def _nbytes(axes: MeshAxes, step: plan.Redistribute, move: Move) -> float:
    """The bytes that a rank sends in one move."""
    return _price(attrs.evolve(axes, costs=()), step, move) if move.sends else 0.0


def _price(axes: MeshAxes, step: plan.Redistribute, move: Move) -> float:
    value = step.source.value
    nbytes = local_bytes(work.nbytes(value), move.before, axes.sizes, move.axis)
    if move.kind == HALO:
        nbytes *= layout.halo_share(value.shape, move.after[move.axis])
    return price(move.kind, nbytes, axes.sizes[move.axis], axes.cost(move.axis))


def _computed(axes: MeshAxes, step: plan.Step, of_op: OpPrice) -> float:
    """The price of an op on the busiest rank."""
    if not isinstance(step, plan.Apply):
        return 0.0
    slots = [(slot.value, slot.marks) for slot in (*step.outs, *step.ins)]
    found = of_op(step.node)
    for axis in range(len(axes.sizes)):
        found *= share_of(slots, axes.sizes, axis)
    return found
