"""Put a graph into the order of the agenda: collectives start early and are waited for late."""

from __future__ import annotations

import collections

import torch

from ..agenda import Agenda
from ..order import ordered

WAIT = torch.ops._c10d_functional.wait_tensor.default


def overlap(graph: torch.fx.Graph, agenda: Agenda) -> torch.fx.Graph:
    """The same nodes in the agenda's order. A node that only a start or a reader needs is
    placed right before it.
    """
    nodes: dict[tuple[str, int], list[torch.fx.Node]] = collections.defaultdict(list)
    for node in graph.nodes:
        if "collective" in node.meta:
            nodes["start", node.meta["batch"]].append(node)
            nodes["wait", node.meta["batch"]] += node.users
        elif (
            node.op == "call_function"
            and node.target is not WAIT
            and "transfer" not in node.meta
            and "step" in node.meta
        ):
            nodes["run", node.meta["step"]].append(node)
    return ordered(
        graph, [*(node for item in agenda.sequence for node in nodes[item]), *graph.nodes]
    )
