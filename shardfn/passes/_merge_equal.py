"""Merge collectives that move the same value the same way.

Two redistributions of one value may share their first steps. What is equal is decided by the plan (`key`), not by the
local graph, so every rank merges the same collectives.
"""

from __future__ import annotations

from typing import Any

import torch

from ..types import MeshAxes
from ._copy import copied


def merge_equal(graph: torch.fx.GraphModule, axes: MeshAxes) -> torch.fx.GraphModule:
    """The graph with the second of two equal moves reading the first one's result."""
    out, first = copied(graph), dict[Any, torch.fx.Node]()
    for node in list(out.graph.nodes):
        key = node.meta.get("moved")
        if key is None:
            continue
        if key in first:
            node.replace_all_uses_with(first[key])
            _erase(out.graph, node)
        else:
            first[key] = node
    out.recompile()
    return out


def _erase(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Erase a node and what only it read."""
    if node.users or node.op != "call_function":
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for read in inputs:
        _erase(graph, read)
