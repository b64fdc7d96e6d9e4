"""The strategies that propagation considered for an op on an axis, with their costs. Computed
on demand, by propagating again.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import attrs
import torch

from ..partition import plan
from ..partition.propagate import walked
from ..partition.propagation.values import NO_ADVICE, Placed
from ..partition.propagation.walk import Walk
from ..partition.rule_api.strategy import OpCall
from ..types import PENDING, Mark, Marks, MeshAxes, Program


@attrs.frozen
class Alternative:
    """One strategy of an op on one mesh axis.

    `price` is in bytes, as propagation weighs them (docs/design/partition.md). `sends` has the
    bytes sent for each argument.
    """

    ins: Marks  # a placement for each tensor argument
    outs: Marks
    sends: tuple[float, ...]
    price: float


# Keyed by the number of the op's first result and the mesh axis, the cheapest first. Walks over
# one Program give the same numbers.
Considered = dict[tuple[int, int], tuple[Alternative, ...]]


class _Noting(Walk):
    """A walk that records the strategies it considers."""

    def __init__(self, axes: MeshAxes, name: str, advice: Any) -> None:
        super().__init__(axes, name, advice or NO_ADVICE)
        self.weighed: dict[int, list[Alternative]] = collections.defaultdict(
            list
        )  # for the op at hand, by axis
        self.noted: Considered = {}

    def take(
        self,
        node: torch.fx.Node,
        call: OpCall,
        values: list[Any],
        placed: Placed,
        local: Callable[..., Any] | None = None,
    ) -> None:
        super().take(node, call, values, placed, local)
        made = self.steps[-1].made
        for axis, found in self.weighed.items() if made else ():
            ranked = sorted((a for a in found if a.price != float("inf")), key=lambda a: a.price)
            self.noted[made[0].number, axis] = tuple(ranked)
        self.weighed.clear()

    def choose(self, call: OpCall, values: list[Any], node: torch.fx.Node) -> Placed:
        found = self.weigh(call, values, node)
        return super().choose(call, values, node) if node in self.advice.ops else found

    def price(
        self,
        call: OpCall,
        values: list[Any],
        held: list[list[plan.Slot]],
        placed: Any,
        axis: int,
        is_term: bool,
    ) -> tuple[float, ...]:
        found = super().price(call, values, held, placed, axis, is_term)
        ins, outs = placed
        sends = tuple(
            self.sent(v, slots, m[axis], axis)
            for v, slots, m in zip(values, held, ins, strict=True)
        )
        alternative = Alternative(
            tuple(m[axis] for m in ins), tuple(m[axis] for m in outs), sends, found[0]
        )
        self.weighed[axis].append(alternative)
        return found

    def sent(self, value: Any, slots: list[plan.Slot], wanted: Mark, axis: int) -> float:
        """The bytes that an argument sends. Sharding a replicated value sends nothing."""
        held = {slot.marks[axis] for slot in slots}
        if wanted in held or ("R" in held and wanted not in PENDING):
            return 0.0
        return self.prices.input(value, slots, wanted, axis)


def considered(
    program: Program,
    axes: MeshAxes,
    in_marks: Any,
    out_marks: Any,
    unreduced: Any,
    advice: Any = None,
) -> Considered:
    """Every strategy of each op of a Program, with its cost. The arguments are those of
    `propagate`, and the advice that its plan followed.
    """
    walk = _Noting(axes, program.name, advice)
    walked(walk, program, in_marks, out_marks, unreduced)
    return walk.noted
