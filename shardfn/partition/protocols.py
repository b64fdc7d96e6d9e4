"""Protocols of the walk, for the parts of sharding propagation that are called by it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

from ..types import Mark, Marks, MeshAxes
from . import plan
from .propagation.values import Advice, Placed, Unaligned, Value
from .rule_api.strategy import Choice, OpCall


class Prices(Protocol):
    """The prices of redistributions."""

    axes: MeshAxes
    name: str  # of the program, for errors
    # a Value for each node; for an op with several results a list of them
    values: dict[torch.fx.Node, Any]

    def weight(self, value: Value, slots: list[plan.Slot], axis: int) -> float:
        """The weight of a byte of a value."""
        ...

    def input_price(self, value: Value, slots: list[plan.Slot], wanted: Mark, axis: int) -> float:
        """The price of one input at a placement on one axis."""
        ...


class Walk(Prices, Protocol):
    """One walk over a graph: the values so far, and the steps that made them."""

    unaligned: dict[torch.fx.Node, Unaligned]
    gradients: dict[torch.fx.Node, plan.Gradient]
    advice: Advice
    carried: dict[tuple[int, ...], Marks]  # of loops, by shape
    merged: set[torch.fx.Node]  # gradients that are added before they are placed
    within: dict[torch.fx.Node, torch.fx.Node]  # of ops that stand for one: that one
    summed: dict[torch.fx.Node, list[torch.fx.Node]]  # the terms of sums
    left: set[torch.fx.Node]  # sums whose terms a later sum adds
    later: Collection[torch.fx.Node]  # gradients that stay Partial in their loop
    steps: list[plan.Step]
    leaving: dict[torch.fx.Node, Marks]  # the placements of results that are set
    cotangents: dict[int, plan.Slot]  # of results, by number
    sorts: dict[torch.fx.Graph, Any]  # those that ranks may do on their own rows
    own_rows: dict[torch.fx.Node, Any]  # the ops on such rows

    def fresh(self) -> Walk:
        """A walk over another graph of the same program."""
        ...

    def slot(self, fake: torch.Tensor, marks: Marks) -> plan.Slot:
        """A new slot."""
        ...

    def enter(self, node: torch.fx.Node, marks: Marks, unreduced: str | None) -> plan.Slot:
        """The slot of an input."""
        ...

    def visit(self, node: torch.fx.Node) -> None:
        """Place the result of one node."""
        ...

    def visit_in_place(self, node: torch.fx.Node, graph: torch.fx.Graph) -> None:
        """Place the ops that stand for a node."""
        ...

    def apply(self, node: torch.fx.Node) -> None:
        """Place an op by the cheapest strategy of its sharding rule."""
        ...

    def call(self, node: torch.fx.Node) -> tuple[OpCall, list[Value]]:
        """An op's call, and its input values."""
        ...

    def weigh(
        self,
        call: OpCall,
        values: list[Value],
        node: torch.fx.Node,
        strategies: Sequence[Choice] | None = None,
        fixed: Mapping[int, Choice] = {},
    ) -> Placed:
        """The strategy that moves the fewest bytes, on each axis."""
        ...

    def take(
        self,
        node: torch.fx.Node,
        call: OpCall,
        values: list[Value],
        placed: Placed,
        local: Callable[..., Any] | None = None,
    ) -> None:
        """Place an op so."""
        ...

    def place_as(self, node: torch.fx.Node, value: Value, slot: plan.Slot) -> None:
        """A prim's result is its argument, at one placement."""
        ...

    def valued(self, slot: plan.Slot, varies: frozenset[str]) -> Value:
        """A new value, at one placement."""
        ...

    def redistribute(
        self, value: Value, marks: Marks, node: torch.fx.Node, *, implicit: bool
    ) -> plan.Slot:
        """The value at a placement."""
        ...

    def fit(self, call: OpCall, strategy: Choice, placed: Placed) -> Placed | None:
        """The placements of the axes so far with one more; None if it does not fit."""
        ...

    def reaches(self, value: Value, marks: Marks) -> bool:
        """Whether a value can have a placement."""
        ...
