"""The strategies that sharding propagation weighed for each op on each mesh axis, with their
costs. They are computed on demand, by propagating the program a second time.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import attrs
import torch

from ..partition import plan
from ..partition.propagate import run_walk, within_a_stage
from ..partition.propagation.values import NO_ADVICE, Placed
from ..partition.propagation.walk import Walk
from ..partition.rule_api.strategy import OpCall
from ..types import PARTIAL_KINDS, AxisPlacement, MeshAxes, MeshPlacements, Program


@attrs.frozen
class Alternative:
    """One strategy of an op on one mesh axis.

    `price` is in bytes, as propagation weighs them (docs/design/partition.md). `sends` has the
    bytes sent for each argument.
    """

    ins: MeshPlacements  # a placement for each tensor argument
    outs: MeshPlacements
    sends: tuple[float, ...]
    price: float


# Keyed by the number of the op's first result and the mesh axis, the cheapest first. Walks over
# one Program give the same numbers.
WeighedStrategies = dict[tuple[int, int], tuple[Alternative, ...]]


class _RecordingWalk(Walk):
    """Propagation that also records every strategy that it weighs."""

    def __init__(self, axes: MeshAxes, name: str, advice: Any) -> None:
        super().__init__(axes, name, advice or NO_ADVICE)
        self.weighed_by_axis: dict[int, list[Alternative]] = collections.defaultdict(
            list
        )  # for the op at hand, by axis
        self.ranked: WeighedStrategies = {}

    def take(
        self,
        node: torch.fx.Node,
        call: OpCall,
        values: list[Any],
        placed: Placed,
        local: Callable[..., Any] | None = None,
    ) -> None:
        """Place an op, and keep its weighed strategies under the number of its first result."""
        super().take(node, call, values, placed, local)
        results = self.steps[-1].made
        for axis, alternatives in self.weighed_by_axis.items() if results else ():
            by_price = sorted(
                (a for a in alternatives if a.price != float("inf")), key=lambda a: a.price
            )
            self.ranked[results[0].number, axis] = tuple(by_price)
        self.weighed_by_axis.clear()

    def choose(self, call: OpCall, values: list[Any], node: torch.fx.Node) -> Placed:
        """Return the placements of an op; weigh its strategies also where the advice names one."""
        cheapest = self.weigh(call, values, node)
        return super().choose(call, values, node) if node in self.advice.ops else cheapest

    def price(
        self,
        call: OpCall,
        values: list[Any],
        slots_by_value: list[list[plan.Slot]],
        placed: Any,
        axis: int,
        is_term: bool,
    ) -> tuple[float, ...]:
        """Return the price of a strategy as propagation does, and record the strategy with it."""
        price = super().price(call, values, slots_by_value, placed, axis, is_term)
        ins, outs = placed
        sends = tuple(
            self.sent(v, slots, m[axis], axis)
            for v, slots, m in zip(values, slots_by_value, ins, strict=True)
        )
        alternative = Alternative(
            tuple(m[axis] for m in ins), tuple(m[axis] for m in outs), sends, price[0]
        )
        self.weighed_by_axis[axis].append(alternative)
        return price

    def sent(self, value: Any, slots: list[plan.Slot], wanted: AxisPlacement, axis: int) -> float:
        """Return the bytes that an argument sends to reach a placement. Sharding a replicated
        value sends nothing.
        """
        placements = {slot.placements[axis] for slot in slots}
        if wanted in placements or ("R" in placements and wanted not in PARTIAL_KINDS):
            return 0.0
        return self.prices.input(value, slots, wanted, axis)


def weighed_strategies(
    program: Program,
    axes: MeshAxes,
    in_placements: Any,
    out_marks: Any,
    unreduced: Any,
    advice: Any = None,
) -> WeighedStrategies:
    """Return every strategy of each op of a Program, with its cost.

    The arguments are those of `propagate`, and the advice that its plan followed.
    """
    _, axes, ins, outs = within_a_stage(program, axes, in_placements, out_marks)
    walk = _RecordingWalk(axes, program.name, advice)
    run_walk(walk, program, ins, outs, unreduced)
    return walk.ranked
