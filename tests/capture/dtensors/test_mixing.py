"""Ops of DTensors and plain tensors, and of DTensors and numbers of each rank: what is refused."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.capture.dtensors.mixing import refuse_mixed, refuse_varying
from shardfn.ops import placement, shard_map

PLACED, PLAIN = "dp=S0", "plain"


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
        refuse_mixed(self.call(target, *args), lambda x: x is self.d)


def test_an_op_of_both_is_refused_with_their_shapes() -> None:
    nodes = Nodes()
    for args in [(nodes.d, nodes.x), ([nodes.d, nodes.x],)]:
        with pytest.raises(sf.CaptureError) as caught:
            nodes.check(torch.add, *args)
        text = str(caught.value)
        assert text.startswith(
            "add: of a DTensor of shape (4, 2) and a plain tensor of shape (4, 2)"
        )
        assert "x.to_local() of the DTensor" in text


def test_ops_of_one_kind_and_of_numbers_are_right() -> None:
    nodes = Nodes()
    nodes.check(torch.add, nodes.d, nodes.d)
    nodes.check(torch.add, nodes.x, nodes.x)
    nodes.check(torch.mul, nodes.d, nodes.n)
    nodes.check(torch.mul, nodes.d, 2)


def test_nodes_that_only_carry_values_on_are_right() -> None:
    nodes = Nodes()
    nodes.check(placement.align, nodes.d, [nodes.x])
    nodes.check(operator.getitem, nodes.d, 0)
    body = nodes.graph.get_attr("body")
    nodes.check(torch.ops.higher_order.wrap, body, nodes.d, nodes.x)


def test_a_dtensor_where_a_ranks_own_tensor_is_needed_is_refused() -> None:
    nodes = Nodes()
    for target, name in (
        (shard_map.psum, "psum"),
        (placement.shared, "DTensor.from_local"),
    ):
        with pytest.raises(sf.CaptureError) as caught:
            nodes.check(target, nodes.d, "dp")
        text = str(caught.value)
        assert text.startswith(f"{name}: of a DTensor"), text
        assert "each rank's own tensor" in text
    nodes.check(shard_map.to_local, nodes.d, "dp:2=0,tp:2=")
    nodes.check(shard_map.own_term, nodes.d, "dp", "sum")
    nodes.check(shard_map.psum, nodes.x, "dp", False)


def varying(nodes: Nodes, *of: torch.fx.Node, over: str = "dp") -> None:
    """Check the graph if these values vary over an axis."""
    varies = lambda x: frozenset({over} if x in of else ())
    refuse_varying(nodes.graph, varies)


def test_a_dtensor_that_varies_over_an_axis_of_its_mesh_is_refused() -> None:
    nodes = Nodes()
    y = nodes.call(torch.mul, nodes.d, nodes.n)
    varying(nodes, nodes.x, nodes.n)
    varying(nodes, y, over="pp")
    with pytest.raises(sf.CaptureError) as caught:
        varying(nodes, y)
    text = str(caught.value)
    assert (
        "mul: of a DTensor and a number or a condition that differs over dp"
        in text
    )
    assert "dist.all_reduce or sf.psum it first" in text


def test_a_local_tensor_may_vary() -> None:
    nodes = Nodes()
    local = nodes.call(shard_map.to_local, nodes.d, "dp:2=0,tp:2=")
    after = nodes.call(torch.mul, local, 2)
    varying(nodes, local, after)


def test_a_returned_dtensor_may_vary_over_no_axis() -> None:
    nodes = Nodes()
    out = nodes.call(placement.returned, nodes.d)
    with pytest.raises(sf.CaptureError, match="a result that differs over pp"):
        varying(nodes, out, over="pp")


def test_the_line_is_that_of_the_nearest_node_that_has_one() -> None:
    nodes = Nodes()
    y = nodes.call(torch.mul, nodes.d, nodes.n)
    y.meta["stack_trace"] = 'File "model.py", line 7, in f\n    y = d * n'
    z = nodes.call(torch.neg, y)
    with pytest.raises(sf.CaptureError) as caught:
        varying(nodes, z)
    assert "model.py:7" in str(caught.value)
