"""Reorder a graph, with each node after its inputs."""

from __future__ import annotations

from collections.abc import Iterable

import torch

Nodes = list[torch.fx.Node]


def ordered(graph: torch.fx.Graph, wanted: Iterable[torch.fx.Node]) -> torch.fx.Graph:
    """Copy a graph with its nodes in another order; inputs still precede their readers. A graph
    in that order is returned itself.

    Args:
        graph: may be out of topological order.
        wanted: nodes in the order wanted. Placeholders always come first and the output last.
    """
    sequence = _sequence(graph, wanted)
    if sequence == [*graph.nodes]:
        return graph
    fresh = torch.fx.Graph()
    env = dict[torch.fx.Node, torch.fx.Node]()
    for node in sequence:
        copy = env[node] = fresh.node_copy(node, env.__getitem__)
        copy.name, copy.meta = node.name, dict(node.meta)
    return fresh


def sort(graph: torch.fx.Graph) -> None:
    """Sort a graph's nodes in place, so that inputs precede their readers."""
    nodes = _sequence(graph, graph.nodes)
    for node in nodes[:-1]:
        nodes[-1].prepend(node)


def _sequence(graph: torch.fx.Graph, wanted: Iterable[torch.fx.Node]) -> Nodes:
    """List all nodes in the order wanted, inputs before readers."""
    (output,) = graph.find_nodes(op="output")
    placed = dict[torch.fx.Node, None]()

    def place(node: torch.fx.Node) -> None:
        stack = [node]
        while stack:
            current = stack[-1]
            missing = [x for x in current.all_input_nodes if x not in placed]
            if current in placed:
                stack.pop()
            elif missing:
                stack += reversed(missing)
            else:
                placed[stack.pop()] = None

    for node in graph.find_nodes(op="placeholder"):
        place(node)
    for node in wanted:
        if node is not output:
            place(node)
    place(output)
    return list(placed)
