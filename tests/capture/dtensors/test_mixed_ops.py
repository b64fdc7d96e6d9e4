"""Ops of DTensors and plain tensors, and of DTensors and numbers of each rank: what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.capture.dtensors.mixed_ops import Origin, refuse_mixed, refuse_varying
from shardfn.ops import placement


class Nodes:
    """A graph with a DTensor d, a plain tensor x, a number n, and ops on them."""

    def __init__(self) -> None:
        self.graph = torch.fx.Graph()
        self.x = self._value(self.graph.placeholder("x"), 4, 2)
        self.n = self._value(self.graph.placeholder("n"))
        self.d = self.call(placement.placed, self.x, "dp=S0,tp=R")

    def call(self, target: Any, *args: Any) -> torch.fx.Node:
        return self._value(self.graph.call_function(target, args), 4, 2)

    def _value(self, node: torch.fx.Node, *shape: int) -> torch.fx.Node:
        node.meta["example_value"] = torch.empty(shape)
        return node

    def check(self, target: Any, *args: Any) -> None:
        names = {self.d: Origin("argument d", "d")}
        origin_of = lambda x: names.get(x, Origin(f"argument {x.name}", x.name))
        refuse_mixed(self.call(target, *args), lambda x: x is self.d, origin_of)


def varying(nodes: Nodes, *of: torch.fx.Node, over: str = "dp") -> None:
    """Check the graph if these values vary over an axis."""
    varies = lambda x: frozenset({over} if x in of else ())
    refuse_varying(nodes.graph, varies)


def test_a_returned_dtensor_may_vary_over_no_axis() -> None:
    nodes = Nodes()
    out = nodes.call(placement.per_rank_result, nodes.d)
    with pytest.raises(sf.CaptureError, match="the result differs over pp"):
        varying(nodes, out, over="pp")
