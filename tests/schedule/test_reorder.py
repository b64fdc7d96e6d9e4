"""A graph is copied into another order, with inputs before readers."""

from __future__ import annotations

import torch

from shardfn.schedule.reorder import ordered

aten = torch.ops.aten


def chain() -> tuple[torch.fx.Graph, list[torch.fx.Node]]:
    """The graph of (x + x, x * x), and its ops."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    ops = [graph.call_function(op, (x, x)) for op in (aten.add.Tensor, aten.mul.Tensor)]
    graph.output([*ops])
    return graph, ops


def test_a_graph_in_another_order_is_a_copy() -> None:
    graph, (add, mul) = chain()
    found = ordered(graph, [mul, add])
    assert [node.name for node in found.nodes] == ["x", mul.name, add.name, "output"]
    assert [node.name for node in graph.nodes] == ["x", add.name, mul.name, "output"]


def test_a_graph_in_that_order_is_not_copied() -> None:
    graph, (add, mul) = chain()
    assert ordered(graph, [add, mul]) is graph
    assert ordered(graph, []) is graph
