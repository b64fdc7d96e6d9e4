"""A copy of a graph, so that a pass returns a new one."""

from __future__ import annotations

import torch


def copied(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A copy of a graph, node by node, with names and metadata."""
    fresh = torch.fx.Graph()
    env = {}
    for node in graph.nodes:
        env[node] = fresh.node_copy(node, env.__getitem__)
        env[node].name, env[node].meta = node.name, dict(node.meta)
    return fresh
