"""Nodes of a graph: unread ones are removed, and nothing else."""

from __future__ import annotations

import torch

from shardfn.ops.nodes import remove_unread


def test_unread_nodes_without_effects_are_removed() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.placeholder("unread")
    read = graph.call_function(torch.ops.aten.sin.default, (x,))
    unread = graph.call_function(torch.ops.aten.cos.default, (x,))
    graph.call_function(torch.ops.aten.exp.default, (unread,))
    effect = graph.call_function(torch.ops.aten.add_.Tensor, (x, x))
    graph.output(read)
    remove_unread(graph)
    ops = [node.target for node in graph.nodes if node.op == "call_function"]
    assert ops == [read.target, effect.target]
    assert len(graph.find_nodes(op="placeholder")) == 2
