"""How long the values of a graph are alive: the nodes that own memory, and their last readers."""

from __future__ import annotations

import collections
import operator

import torch

from .planner import op_cost


def owners(graph: torch.fx.Graph, *, elements: bool = False) -> dict[torch.fx.Node, torch.fx.Node]:
    """Map each node of a graph to the node whose memory it uses: a view uses that of its base.

    Args:
        graph: any.
        elements: whether each tensor of a tuple has memory of its own, unless they are views of
            one tensor.
    """
    found: dict[torch.fx.Node, torch.fx.Node] = {}
    first: dict[tuple[torch.fx.Node, object], torch.fx.Node] = {}
    for node in graph.nodes:
        is_view = node.op == "call_function" and op_cost.is_alias(node)
        base: torch.fx.Node = node.all_input_nodes[0] if is_view else node
        is_item = node.target is operator.getitem
        is_element = is_item and not op_cost.is_alias(base)
        if elements and is_element:
            place = base, node.args[1]
            base = first.setdefault(place, node)
        found[node] = found.get(base, base)
    return found


def ends_of(
    graph: torch.fx.Graph, owner: dict[torch.fx.Node, torch.fx.Node]
) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    """Map each node to the nodes whose memory it is the last to use."""
    last: dict[torch.fx.Node, torch.fx.Node] = {}
    nodes: list[torch.fx.Node] = list(graph.nodes)
    for node in nodes:
        last[owner[node]] = node
        for read in node.all_input_nodes:
            last[owner.get(read, read)] = node
    ends: dict[torch.fx.Node, list[torch.fx.Node]] = collections.defaultdict(list)
    for node, end in last.items():
        ends[end].append(node)
    return ends
