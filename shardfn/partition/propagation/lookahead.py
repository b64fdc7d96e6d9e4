"""One step of lookahead: the cost of a value's placement for its readers. It decides between
strategies of equal cost.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Node

from ... import _compat
from ...types import PENDING, Marks
from .. import rules
from ..rule_api.checked import answered
from ..rule_api.strategy import Choice, arguments, call_of
from .prices import INFINITE, Prices
from .values import Value

COPY = torch.ops.aten._to_copy.default
FEW = 4  # the number of readers considered

Choices = list[tuple[Choice, list[Node]]]  # strategies, each with the tensor arguments


class Ahead:
    """The prices of placements for the readers of a Program's values.

    Args:
        prices: of moves.
        values: the values so far, by node.
        name: of the program, for errors.
    """

    def __init__(self, prices: Prices, values: Mapping[Node, object], name: str) -> None:
        self.prices, self.values, self.name = prices, values, name
        self.known_choices: dict[Node, Choices] = {}
        self.known_prices: dict[tuple[Node, Marks, int], float] = {}
        self.times = 0  # how often a result was priced for its readers

    def price(self, node: Node, marks: Marks, axis: int) -> float:
        """The fewest bytes that the readers of an op's result move on one axis.

        Args:
            node: an op with one result.
            marks: the placements of its result, on the axes up to this one.
            axis: the current axis.
        """
        self.times += 1
        if marks[axis] in PENDING:
            return 0.0  # its reduction is part of the cost of the strategy itself
        key = node, marks, axis
        if key not in self.known_prices:
            value = _past_copy(node)
            readers = list(value.users)[:FEW]
            self.known_prices[key] = sum(self.cheapest(value, x, marks, axis) for x in readers)
        return self.known_prices[key]

    def cheapest(self, node: Node, reader: Node, marks: Marks, axis: int) -> float:
        """The fewest bytes that one reader of a value moves. None where that is not known."""
        rows = self.choices(reader)
        prices = (self.moved(node, reader, *row, marks, axis) for row in rows)
        least = min(prices, default=0.0)
        return 0.0 if least == INFINITE else least

    def moved(
        self, node: Node, reader: Node, choice: Choice, nodes: list[Node], marks: Marks, axis: int
    ) -> float:
        """The bytes that one strategy of a reader moves: of the value, of other available
        inputs, and to reduce a Partial result.
        """
        ins, outs = choice
        total = 0.0
        if outs[0] in PENDING:
            alone = ("R",) * axis
            total += self.prices.move(reader.meta["val"], (*alone, outs[0]), "R", axis)
        for other, wanted in zip(nodes, ins, strict=True):
            if other is node:
                total += self.prices.move(other.meta["val"], marks, wanted, axis)
            elif isinstance(value := self.values.get(other), Value) and (
                slots := value.held(node.meta["phase"])
            ):
                price = self.prices.input(value, slots, wanted, axis)
                total += price * self.prices.weight(value, slots, axis)
        return total

    def choices(self, reader: Node) -> Choices:
        """The strategies of a reader, each with its tensor arguments. None for a node that is
        not an op with a rule and one result.
        """
        if reader not in self.known_choices:
            self.known_choices[reader] = self.choices_of(reader)
        return self.known_choices[reader]

    def choices_of(self, reader: Node) -> Choices:
        """The strategies of a reader by its rule."""
        is_op = isinstance(reader.target, _compat.OpOverload)
        has_one_result = isinstance(reader.meta.get("val"), torch.Tensor)
        if not is_op or reader.target.namespace == "shardfn" or not has_one_result:
            return []
        call = call_of(reader)
        if call is None:
            return []
        nodes = arguments(reader)
        rows = answered(rules.find(call.target), call, self.name, reader)
        return [(choice, nodes) for choice in rows]


def _past_copy(node: Node) -> Node:
    """The only reader of a value, where that is a cast, whose result has any placement of the
    value.
    """
    (reader, *others) = [*node.users] or [node]
    is_copy = reader.target is COPY and not others
    return reader if is_copy else node
