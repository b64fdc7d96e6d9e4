"""One step of lookahead: the cost of a value's placement for its readers. It decides between
strategies of equal cost.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import _compat
from ...types import PENDING, Marks
from .. import rules
from ..protocols import Prices
from ..redistribute import local_bytes, mark_price
from ..rule_api.checked import answered
from ..rule_api.strategy import Choice, OpCall
from .values import Value

COPY = torch.ops.aten._to_copy.default
FEW = 4  # the number of readers considered


class Ahead:
    """The costs of the readers of a Program's values."""

    def __init__(self, walk: Prices) -> None:
        self.walk = walk
        self.known: dict[torch.fx.Node, list[tuple[Choice, list[torch.fx.Node]]]] = {}
        self.prices: dict[Any, float] = {}
        self.times = 0  # how often a result was priced for its readers

    def price(self, node: torch.fx.Node, marks: Marks, axis: int) -> float:
        """The fewest bytes that the readers of an op's result move on one axis, given its
        placements.

        Args:
            node: an op with one result.
            marks: the placements of the axes up to this one.
            axis: the current axis.
        """
        self.times += 1
        if marks[axis] in PENDING:
            return 0.0  # its reduction is part of the cost of the strategy itself
        key = node, marks, axis
        if key not in self.prices:
            self.prices[key] = sum(
                self.best(node, reader, marks, axis)
                for reader in list(_past_copy(node).users)[:FEW]
            )
        return self.prices[key]

    def best(self, node: torch.fx.Node, reader: torch.fx.Node, marks: Marks, axis: int) -> float:
        node = _past_copy(node)
        prices = (
            self.paid(node, reader, choice, nodes, marks, axis)
            for choice, nodes in self.choices(reader)
        )
        found = min(prices, default=0.0)
        return 0.0 if found == float("inf") else found

    def paid(
        self,
        node: torch.fx.Node,
        reader: torch.fx.Node,
        choice: Choice,
        nodes: list[torch.fx.Node],
        marks: Marks,
        axis: int,
    ) -> float:
        """The bytes that one strategy of a reader moves: of the value, of other available
        inputs, and to reduce a Partial result.
        """
        walk = self.walk
        total = 0.0
        n = walk.axes.sizes[axis]
        sizes = walk.axes.sizes
        if choice[1][0] in PENDING:
            made = reader.meta["val"]
            total += mark_price(
                choice[1][0],
                "R",
                float(made.numel() * made.element_size()),
                n,
                made.shape,
                walk.axes.cost(axis),
            )
        for other, wanted in zip(nodes, choice[0], strict=True):
            fake = other.meta["val"]
            if other is node:
                nbytes = local_bytes(
                    float(fake.numel() * fake.element_size()), marks, sizes[: len(marks)], axis
                )
                total += mark_price(
                    marks[axis], wanted, nbytes, n, fake.shape, walk.axes.cost(axis)
                )
            elif isinstance(value := walk.values.get(other), Value) and (
                held := value.held(node.meta["phase"])
            ):
                total += walk.input_price(value, held, wanted, axis) * walk.weight(
                    value, held, axis
                )
        return total

    def choices(self, reader: torch.fx.Node) -> list[tuple[Choice, list[torch.fx.Node]]]:
        """The strategies of a reader, and its tensor arguments. None for a node that is not an
        op with a rule.
        """
        if reader not in self.known:
            self.known[reader] = list(self.asked(reader))
        return self.known[reader]

    def asked(self, reader: torch.fx.Node) -> list[tuple[Choice, list[torch.fx.Node]]]:
        result = reader.meta.get("val")
        is_op = (
            isinstance(reader.target, _compat.OpOverload) and reader.target.namespace != "shardfn"
        )
        if not is_op or not isinstance(result, torch.Tensor):
            return []
        nodes: list[torch.fx.Node] = []
        torch.fx.node.map_arg((reader.args, reader.kwargs), nodes.append)
        if not all(isinstance(x.meta.get("val"), torch.Tensor) for x in nodes):
            return []
        call = OpCall(
            reader.target,
            reader.args,
            dict(reader.kwargs),
            tuple(x.meta["val"] for x in nodes),
            (result,),
        )
        return [
            (choice, nodes)
            for choice in answered(rules.find(call.target), call, self.walk.name, reader)
        ]


def _past_copy(node: torch.fx.Node) -> torch.fx.Node:
    """The only reader of a value, where that is a cast, whose result has any placement of the
    value.
    """
    (reader, *others) = [*node.users] or [node]
    is_copy = reader.target is COPY and not others
    return reader if is_copy else node
