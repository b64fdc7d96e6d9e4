"""Merge equal collectives of the same value.

Two redistributions of one value may share their first steps. Equality is decided by the plan
(`key`), not by the local graph, so every rank merges the same collectives.
"""

from __future__ import annotations

from typing import Any

import torch

from ...ops.graph_copies import copied
from ..schedule_plan import SchedulePlan


def merge_equal(graph: torch.fx.Graph, schedule_plan: SchedulePlan) -> torch.fx.Graph:
    """The graph with the second of two equal moves reading the first one's result."""
    keys = [node.meta["moved"] for node in graph.nodes if "moved" in node.meta]
    if len(set(keys)) == len(keys):
        return graph
    out = copied(graph)
    first = dict[Any, torch.fx.Node]()
    for node in list(out.nodes):
        key = node.meta.get("moved")
        if key is None:
            continue
        if key in first:
            node.replace_all_uses_with(first[key])
            _erase(out, node)
        else:
            first[key] = node
    return out


def _erase(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Erase a node, and the nodes that only it read."""
    if node.users or node.op != "call_function":
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for read in inputs:
        _erase(graph, read)
