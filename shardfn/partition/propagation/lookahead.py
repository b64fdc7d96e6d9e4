"""One step of lookahead: the cost of a value's placement for its readers. It decides between
strategies of equal cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from ... import _compat
from ...ops.elementwise import Elementwise
from ...ops.placement import ALIGN
from ...types import PARTIAL_KINDS, MeshPlacements
from .. import rules
from ..rule_api.check_strategies import strategies_of
from ..rule_api.strategy import Choice, arguments, call_of
from .redistribution_prices import INFINITE, Prices
from .values import Value

COPY = torch.ops.aten._to_copy.default
FEW = 4  # the number of readers considered

Choices = list[tuple[Choice, list[Node]]]  # strategies, each with the tensor arguments


class Ahead:
    """Prices of placements for the readers of a value: one step of lookahead, to break ties.

    Args:
        prices: of moves.
        values: the values so far, by node.
        name: of the program, for errors.
    """

    def __init__(self, prices: Prices, values: Mapping[Node, object], name: str) -> None:
        self.prices, self.values, self.name = prices, values, name
        self.known_choices: dict[Node, Choices] = {}
        self.known_prices: dict[tuple[Node, MeshPlacements, int], float] = {}
        self.times = 0  # how often a result was priced for its readers

    def price(self, node: Node, placements: MeshPlacements, axis: int) -> float:
        """Return the fewest bytes that the readers of a result move if it has these placements.

        Args:
            node: an op with one result.
            placements: the placements of its result, on the axes up to this one.
            axis: the current axis.
        """
        self.times += 1
        if placements[axis] in PARTIAL_KINDS:
            return 0.0  # its reduction is part of the cost of the strategy itself
        key = node, placements, axis
        if key not in self.known_prices:
            value = _past_copy(node)
            readers = list(value.users)[:FEW]
            self.known_prices[key] = sum(self.cheapest(value, x, placements, axis) for x in readers)
        return self.known_prices[key]

    def cheapest(self, node: Node, reader: Node, placements: MeshPlacements, axis: int) -> float:
        """Return the fewest bytes that one reader moves; 0 where that is not known."""
        rows = self.choices(reader)
        prices = (self.moved(node, reader, *row, placements, axis) for row in rows)
        least = min(prices, default=0.0)
        return 0.0 if least == INFINITE else least

    def moved(
        self,
        node: Node,
        reader: Node,
        choice: Choice,
        nodes: list[Node],
        placements: MeshPlacements,
        axis: int,
    ) -> float:
        """Return the bytes that one strategy of a reader moves, or that ranks send inside of it."""
        ins, outs = choice
        total = 0.0
        if rules.row_of(reader.target).sends is not None and (call := call_of(reader)):
            before = placements[:axis]
            total += self.prices.inside(call, [(*before, wanted) for wanted in ins], axis)
        if outs[0] in PARTIAL_KINDS:
            alone = ("R",) * axis
            total += self.prices.move(reader.meta["val"], (*alone, outs[0]), "R", axis)
        for other, wanted in zip(nodes, ins, strict=True):
            if other is node:
                total += self.prices.move(other.meta["val"], placements, wanted, axis)
            elif isinstance(value := self.values.get(other), Value) and (
                slots := value.strategy_slots(node.meta["phase"])
            ):
                price = self.prices.input(value, slots, wanted, axis)
                total += price * self.prices.weight(value, slots, axis)
        return total

    def choices(self, reader: Node) -> Choices:
        """Return the strategies of a reader, from a cache."""
        if reader not in self.known_choices:
            self.known_choices[reader] = self.choices_of(reader)
        return self.known_choices[reader]

    def choices_of(self, reader: Node) -> Choices:
        """Ask the rule of a reader for its strategies; none for a prim or an op with several
        results. A gradient is placed as its parameter.
        """
        if reader.target is ALIGN:
            nodes = arguments(reader)  # the gradient and the parameter
            dims: list[Any] = ["R", *range(reader.meta["val"].dim())]
            return [(((d, d), (d,)), nodes) for d in dims]
        is_op = isinstance(reader.target, _compat.OpOverload)
        has_one_result = isinstance(reader.meta.get("val"), torch.Tensor)
        is_known = is_op and reader.target.namespace != "shardfn" and has_one_result
        if not is_known and not isinstance(reader.target, Elementwise):
            return []
        call = call_of(reader)
        if call is None:
            return []
        nodes = arguments(reader)
        rows = strategies_of(rules.find(call.target), call, self.name, reader)
        return [(choice, nodes) for choice in rows]


def _past_copy(node: Node) -> Node:
    """Skip a cast that is the only reader of a value. Returns the node whose readers count."""
    (reader, *others) = [*node.users] or [node]
    is_copy = reader.target is COPY and not others
    return reader if is_copy else node
