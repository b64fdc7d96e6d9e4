"""Reorder a graph, with each node after its inputs."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def ordered(
    graph: torch.fx.Graph, wanted: Iterable[torch.fx.Node]
) -> torch.fx.Graph:
    """The graph with its nodes in this order. An input that does not precede its reader is
    moved to right before it.

    Args:
        graph: may be out of topological order.
        wanted: nodes in the order wanted. Placeholders always come first and the output last.
    """
    fresh = torch.fx.Graph()
    env = dict[torch.fx.Node, torch.fx.Node]()

    def place(node: torch.fx.Node) -> None:
        stack = [node]
        while stack:
            current = stack[-1]
            missing = [x for x in current.all_input_nodes if x not in env]
            if current in env:
                stack.pop()
            elif missing:
                stack += reversed(missing)
            else:
                stack.pop()
                copy = env[current] = fresh.node_copy(current, env.__getitem__)
                copy.name, copy.meta = current.name, dict(current.meta)

    (output,) = graph.find_nodes(op="output")
    for node in graph.find_nodes(op="placeholder"):
        place(node)
    for node in wanted:
        if node is not output:
            place(node)
    place(output)
    return fresh
