"""The cheapest strategy of an op's sharding rule on each mesh axis, and the cheapest moves
between placements.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...ops import shard_map
from ...ops.prims import CALLS
from ...types import PENDING, REDUCTIONS, Mark, Marks, MeshAxes
from .. import plan, rules
from ..redistribute import Move, local_bytes, mark_price, route
from ..rule_api.checked import answered, failed
from ..rule_api.strategy import Choice, OpCall, replicated
from .alike import likeness
from .lookahead import Ahead
from .units import extended, in_units
from .values import NO_ADVICE, Advice, Placed, Value, is_numbered

OWN_TERM = CALLS[shard_map.own_term].op
INFINITE = float("inf")  # the cost of an impossible placement


class Price(NamedTuple):
    """The sort key of a strategy on one mesh axis: bytes first."""

    nbytes: float  # bytes moved, each weighted by how much of it is exposed
    shared_partial: float  # 1 where a Partial stays unreduced that other ops read too
    resharded: float  # outputs whose sharding appears or disappears

    @property
    def cost(self) -> tuple[float, float]:
        """Among strategies with equal values of this, the readers of the result decide."""
        return self.nbytes, self.shared_partial


class Chosen(NamedTuple):
    """The choice for one op."""

    call: OpCall
    values: list[Value]  # its inputs
    placed: Placed


Priced = tuple[Price, Placed]


class Chooser:
    """Chooses strategies for a walk.

    Args:
        axes: of the mesh.
        name: of the program, for errors.
        advice: the placements that a plan of all ops has for its ops.
    """

    def __init__(self, axes: MeshAxes, name: str, advice: Advice = NO_ADVICE) -> None:
        self.axes, self.name = axes, name
        self.advice = advice
        self.values: dict[torch.fx.Node, Any] = {}
        self.ahead = Ahead(self)
        # the placements of ops that were weighed, by `likeness`
        self.alike: dict[tuple[Any, ...] | None, Placed] = {}
        # the placements of `out_placements`, by result
        self.leaving: dict[torch.fx.Node, Marks] = {}

    def choose(self, call: OpCall, values: list[Value], node: torch.fx.Node) -> Placed:
        """The advice for an op if its inputs can be placed so, else its cheapest strategies."""
        advised = self.advice.ops.get(node)
        if advised is not None and all(map(self.reaches, values, advised.ins)):
            return advised
        held = [v.held(node.meta["phase"]) for v in values]
        axes = range(len(self.axes.sizes))
        is_term = [self.stays_partial(node, axis) for axis in axes]
        key = likeness(call, values, held, is_term)
        if key in self.alike:
            ins, outs = self.alike[key]
            return Placed([*ins], [*outs])
        times = self.ahead.times
        placed = self.weigh(call, values, node)
        if key is not None and self.ahead.times == times:
            self.alike[key] = Placed([*placed.ins], [*placed.outs])
        return placed

    def weigh(
        self,
        call: OpCall,
        values: list[Value],
        node: torch.fx.Node,
        strategies: Sequence[Choice] | None = None,
        fixed: Mapping[int, Choice] = {},
    ) -> Placed:
        """For each axis, in mesh order, the strategy that moves the fewest bytes.

        Args:
            call: the op.
            values: its inputs.
            node: its node.
            strategies: some of those of its rule. By default all.
            fixed: the strategies of axes of which the op leaves no choice.
        """
        if strategies is None:
            rule = rules.find(call.target)
            strategies = answered(rule, call, self.name, node)
        held = [v.held(node.meta["phase"]) for v in values]
        varies = frozenset().union(*(v.varies for v in values))
        placed = Placed([()] * len(call.ins), [()] * len(call.outs))
        for axis, name in enumerate(self.axes.names):
            # values that vary between ranks are computed by each rank alone
            rows = [replicated(call)] if name in varies else strategies
            own = _in_units(call, rows, held, axis)
            if axis in fixed:
                own = [fixed[axis]]
            fitting = self.fitting(call, own, placed)
            if not fitting:
                raise failed(
                    f"none of its strategies fits on axis {name}",
                    rules.find(call.target),
                    call,
                    self.name,
                    node,
                )
            is_term = self.stays_partial(node, axis)
            priced = [(self.price(call, values, held, fit, axis, is_term), fit) for fit in fitting]
            placed = self.best(node, priced, axis)
        return placed

    def fitting(self, call: OpCall, strategies: Iterable[Choice], placed: Placed) -> list[Placed]:
        """The placements of the axes so far with one more, for each strategy that fits."""
        found = [self.fit(call, strategy, placed) for strategy in strategies]
        return [fit for fit in found if fit is not None]

    def stays_partial(self, node: torch.fx.Node, axis: int) -> bool:
        """Whether somebody reads the terms of a result: the caller, or code of one rank."""
        wanted = self.leaving.get(node)
        if wanted is not None and wanted[axis] in REDUCTIONS:
            return True
        return any(user.target is OWN_TERM for user in node.users)

    def fit(self, call: OpCall, strategy: Choice, placed: Placed) -> Placed | None:
        """Extend the placements of the axes so far by one axis. None if a unit does not fit."""
        sizes = self.axes.sizes
        ins = _all_extended(call.ins, placed.ins, strategy[0], sizes)
        outs = _all_extended(call.outs, placed.outs, strategy[1], sizes)
        return None if ins is None or outs is None else Placed(ins, outs)

    def best(self, node: torch.fx.Node, priced: list[Priced], axis: int) -> Placed:
        """The cheapest of some strategies. Among equals, the one whose result is cheapest for
        its readers, then the first. A reduce-scatter, which costs a start more, is the equal
        of its all-reduce.
        """
        least, shared = min(price.cost for price, _ in priced)
        starts = (0.0, self.axes.cost(axis).start) if least else (0.0,)
        costs = [least + start for start in starts]
        equals = [
            (price, placed)
            for price, placed in priced
            if price.nbytes in costs and price.shared_partial == shared
        ]
        has_one_result = isinstance(node.meta.get("val"), torch.Tensor)
        if len(equals) == 1 or not has_one_result:
            return min(equals, key=lambda pair: pair[0])[1]

        def with_readers(pair: Priced) -> tuple[float, Price]:
            price, placed = pair
            return self.ahead.price(node, placed.outs[0], axis), price

        return min(equals, key=with_readers)[1]

    def price(
        self,
        call: OpCall,
        values: list[Value],
        held: list[list[plan.Slot]],
        placed: Placed,
        axis: int,
        is_term: bool,
    ) -> Price:
        """The sort key of a strategy on one axis: its cost, then how much it changes the
        sharding of the inputs.
        """
        # one loop, since this runs for every strategy of every op
        nbytes = 0.0
        passes_partial = False
        shared_partial = False
        was_sharded = False
        # one value as two arguments moves once
        counted: set[tuple[int, Mark]] = set()
        for value, slots, marks in zip(values, held, placed.ins, strict=True):
            wanted = marks[axis]
            if not was_sharded:
                was_sharded = any(slot.marks[axis] != "R" for slot in slots)
            if wanted in PENDING:
                passes_partial = True
                shared_partial = not is_term and (shared_partial or value.users > 1)
            if (id(value), wanted) not in counted:
                counted.add((id(value), wanted))
                price = self.input_price(value, slots, wanted, axis)
                nbytes += price * self.weight(value, slots, axis)
        resharded = sum((m[axis] == "R") == was_sharded for m in placed.outs)
        if not is_term and (passes_partial or nbytes > 0):
            for x, marks in zip(call.outs, placed.outs, strict=True):
                if marks[axis] in PENDING:
                    nbytes += self.reduce_price(x, marks, axis)
        return Price(nbytes, float(shared_partial), float(resharded))

    def weight(self, value: Value, slots: list[plan.Slot], axis: int) -> float:
        """The weight of a byte of a value."""
        if not value.early or any(slot.marks[axis] in PENDING for slot in slots):
            return 1.0
        return self.advice.early

    def input_price(self, value: Value, slots: list[plan.Slot], wanted: Mark, axis: int) -> float:
        """The cost of one input at a placement on one axis."""
        if value.fill is not None:
            return 0.0 if rules.fill_fits(value.fill[1], wanted) else INFINITE
        if value.recipe is not None:
            return 0.0 if is_numbered(wanted) else INFINITE
        if any(slot.marks[axis] == wanted for slot in slots):
            return 0.0
        n = self.axes.sizes[axis]
        nbytes = _nbytes(value.fake)
        shape = value.fake.shape
        sizes = self.axes.sizes
        cost = self.axes.cost(axis)
        return min(
            mark_price(
                slot.marks[axis],
                wanted,
                local_bytes(nbytes, slot.marks, sizes, axis),
                n,
                shape,
                cost,
            )
            for slot in slots
        )

    def reduce_price(self, x: torch.Tensor, marks: Marks, axis: int) -> float:
        """The cost of reducing a Partial output on one axis."""
        sizes = self.axes.sizes
        cost = self.axes.cost(axis)
        nbytes = local_bytes(_nbytes(x), marks, sizes[: len(marks)], axis)
        return mark_price(marks[axis], "R", nbytes, sizes[axis], x.shape, cost)

    def cheapest(
        self, value: Value, marks: Marks, phase: str
    ) -> tuple[plan.Slot, tuple[Move, ...]]:
        """The slot from which a placement is cheapest, and the moves from it."""
        least = INFINITE
        best = None
        for slot in value.readable(phase):
            found = self.route(value, slot, marks)
            if found is not None and (best is None or found[0] < least):
                least = found[0]
                best = (slot, found[1])
        assert best is not None, f"no moves to {marks}"
        return best

    def reaches(self, value: Value, marks: Marks) -> bool:
        """Whether a value can have a placement."""
        if value.fill is not None:
            return all(rules.fill_fits(value.fill[1], mark) for mark in marks)
        if value.recipe is not None:
            return all(map(is_numbered, marks))
        slots = value.readable("forward")
        return any(self.route(value, slot, marks) for slot in slots)

    def route(
        self, value: Value, slot: plan.Slot, marks: Marks
    ) -> tuple[float, tuple[Move, ...]] | None:
        """The cheapest moves from a slot to a placement, with their cost."""
        shape = tuple(value.fake.shape)
        itemsize = value.fake.element_size()
        return route(shape, itemsize, slot.marks, marks, self.axes)


def _in_units(
    call: OpCall, rows: Iterable[Choice], held: Iterable[Iterable[plan.Slot]], axis: int
) -> Iterable[Choice]:
    """Strategies, in the units in which the inputs are sharded on an axis."""
    marks = [{slot.marks[axis] for slot in slots} for slots in held]
    for row in rows:
        strided = functools.partial(rules.takes_strided, call, row)
        yield from in_units(row, marks, strided=strided)


def _all_extended(
    tensors: Sequence[torch.Tensor],
    placed: Sequence[Marks],
    row: Sequence[Mark],
    sizes: tuple[int, ...],
) -> list[Marks] | None:
    """The placements of some tensors with one more axis; None where one does not fit."""
    longer: list[Marks] = []
    for x, marks, mark in zip(tensors, placed, row, strict=True):
        fitting = extended(x.shape, marks, mark, sizes)
        if fitting is None:
            return None
        longer.append(fitting)
    return longer


def _nbytes(x: torch.Tensor) -> float:
    return float(x.numel() * x.element_size())
