"""Ops of DTensors and plain tensors, and of DTensors and numbers of each rank: what is refused."""

from __future__ import annotations

import operator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.capture.dtensors.mixing import Origin, origin, refuse_mixed, refuse_varying
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
        names = {self.d: Origin("argument d", "d")}
        origin_of = lambda x: names.get(x, Origin(f"argument {x.name}", x.name))
        refuse_mixed(self.call(target, *args), lambda x: x is self.d, origin_of)


def test_an_op_of_both_is_refused_with_their_shapes() -> None:
    nodes = Nodes()
    for args in [(nodes.d, nodes.x), ([nodes.d, nodes.x],)]:
        with pytest.raises(sf.CaptureError) as caught:
            nodes.check(torch.add, *args)
        text = str(caught.value)
        assert text == (
            """add: of a DTensor and a plain tensor
  argument d: a DTensor of shape (4, 2)
  argument x: a plain tensor of shape (4, 2)
  try: DTensor.from_local(x, mesh, placements) for each rank's own, distribute_tensor(x, mesh, \
placements) for one that all have; or d.to_local()"""
        )


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
    for target, name in ((shard_map.psum, "psum"), (placement.shared, "DTensor.from_local")):
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
    assert "mul: of a DTensor and a number or a condition that differs over dp" in text
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


def test_the_origin_of_a_value_is_an_argument_or_the_line_that_made_it() -> None:
    nodes = Nodes()
    fake = torch.empty(4, 2)
    argument = lambda name: SimpleNamespace(example=fake, source=SimpleNamespace(name=name))
    nodes.x.meta["grapharg"] = argument("L['args'][0]['w']")
    given = [("params['w']", fake)]
    want = Origin("argument params['w']", "params['w']")
    assert origin(nodes.x, {}, given) == want
    assert origin(nodes.d, {}, given) == want, "a mark only carries the value"
    closed_over = origin(nodes.x, {}, [])
    text = "w, a tensor that the function closes over"
    assert closed_over == Origin(text, None)
    y = nodes.call(torch.mul, nodes.d, nodes.n)
    y.meta["stack_trace"] = 'File "model.py", line 7, in f\n    y = d * n'
    assert origin(y, {}, given) == Origin("mul, made at model.py:7", None)
    inner = nodes.graph.placeholder("inner")
    assert origin(inner, {inner: nodes.d}, given) == want
