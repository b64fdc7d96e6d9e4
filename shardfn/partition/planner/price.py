"""The price of a plan: what its collectives send, and what its ops compute on the busiest rank."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch

from ...collectives import HALO
from ...ops.loops import Scan, loop_of
from ...types import MeshAxes
from .. import layout, plan
from ..propagation.walk import ALIGN, op_name
from ..redistribute import Move, local_bytes, price
from . import work
from .share import share_of
from .starts import parameter_slots, timed

LESS = 0.9  # of what the first plan sends, below which another one is followed
MORE = 1.01  # of what the first plan computes, above which another one is not


@attrs.frozen
class PlanPrice:
    """The price of a plan, in bytes over the fastest axis.

    Args:
        sent: of its collectives, with the time that each takes to start.
        nbytes: of its collectives.
        unasked: the bytes of those that no placement of the user asks for, other than gathers of
            parameters.
        computed: of its ops: the bytes that a rank could send meanwhile.
    """

    sent: float
    nbytes: float
    unasked: float
    computed: float

    @property
    def total(self) -> float:
        """The price of one step in which nothing overlaps."""
        return self.sent + self.computed

    def is_below(self, other: PlanPrice) -> bool:
        """Whether it sends clearly less, for no more computation."""
        computes_more = self.computed > MORE * other.computed
        is_faster = self.sent < LESS * other.sent
        sends_less = self.nbytes < LESS * other.nbytes
        return is_faster and sends_less and not computes_more

    def plus(self, other: PlanPrice, times: int) -> PlanPrice:
        """The sum of this price and so many times another one."""
        return PlanPrice(
            self.sent + times * other.sent,
            self.nbytes + times * other.nbytes,
            self.unasked + times * other.unasked,
            self.computed + times * other.computed,
        )


def plan_price(chosen: plan.Plan, graph: torch.fx.Graph) -> PlanPrice:
    """The price of a plan of a graph. The steps of a scan count as often as they run."""
    ahead = parameter_slots(chosen, graph)
    moves = list(_distinct(chosen))
    total = PlanPrice(
        sent=sum(_sent(chosen.axes, step, move, ahead) for step, move in moves),
        nbytes=sum(_nbytes(chosen.axes, step, move) for step, move in moves),
        unasked=sum(
            _unasked(chosen.axes, step, move, ahead) for step, move in moves
        ),
        computed=sum(_computed(chosen.axes, step) for step in chosen.steps),
    )
    for step in chosen.steps:
        if isinstance(step, plan.Nested):
            loop = loop_of(step.node)
            times = loop.length if isinstance(loop, Scan) else 1
            for inner, body in zip(step.plans, loop.graphs, strict=True):
                total = total.plus(plan_price(inner, body), times)
    return total


def _distinct(chosen: plan.Plan) -> Iterator[tuple[plan.Redistribute, Move]]:
    """The moves of a plan; equal ones become one collective."""
    seen = set()
    for step in chosen.steps:
        if not isinstance(step, plan.Redistribute):
            continue
        phase = step.node.meta.get("phase")
        for move in step.moves:
            key = (step.source.number, move.before, move.after, move.perm, phase)
            if key not in seen:
                seen.add(key)
                yield step, move


def _sent(
    axes: MeshAxes, step: plan.Redistribute, move: Move, ahead: set[int]
) -> float:
    """The price of one move, with the time that it takes to start."""
    if not move.sends:
        return _price(axes, step, move)
    is_ahead = step.source.number in ahead or op_name(step.node) == ALIGN
    return _price(timed(axes, is_ahead=is_ahead), step, move)


def _nbytes(axes: MeshAxes, step: plan.Redistribute, move: Move) -> float:
    """The bytes that a rank sends in one move."""
    return _price(attrs.evolve(axes, costs=()), step, move) if move.sends else 0.0


def _unasked(
    axes: MeshAxes, step: plan.Redistribute, move: Move, ahead: set[int]
) -> float:
    """The bytes that a rank sends in one move that no placement of the user asks for."""
    is_asked = step.source.number in ahead or not step.implicit
    return 0.0 if is_asked else _nbytes(axes, step, move)


def _price(axes: MeshAxes, step: plan.Redistribute, move: Move) -> float:
    value = step.source.value
    nbytes = local_bytes(work.nbytes(value), move.before, axes.sizes, move.axis)
    if move.kind == HALO:
        nbytes *= layout.halo_share(value.shape, move.after[move.axis])
    return price(move.kind, nbytes, axes.sizes[move.axis], axes.cost(move.axis))


def _computed(axes: MeshAxes, step: plan.Step) -> float:
    """The price of an op on the busiest rank."""
    if not isinstance(step, plan.Apply):
        return 0.0
    slots = [(slot.value, slot.marks) for slot in (*step.outs, *step.ins)]
    found = work.in_bytes(step.node)
    for axis in range(len(axes.sizes)):
        found *= share_of(slots, axes.sizes, axis)
    return found
