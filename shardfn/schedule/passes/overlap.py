"""Put a graph into its scheduled order: collectives start early and are waited for late."""

from __future__ import annotations

import collections

import torch

from ..reorder import ordered
from ..schedule_plan import SchedulePlan

WAIT = torch.ops._c10d_functional.wait_tensor.default


def overlap(graph: torch.fx.Graph, schedule_plan: SchedulePlan) -> torch.fx.Graph:
    """Reorder the nodes as the schedule says: collectives start early and are waited for late.

    A collective that an op of the plan emits by itself starts with the op.
    """
    nodes: dict[tuple[str, int], list[torch.fx.Node]] = collections.defaultdict(list)
    for node in graph.nodes:
        if "batch" in node.meta and "collective" in node.meta:
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
        graph, [*(node for item in schedule_plan.sequence for node in nodes[item]), *graph.nodes]
    )
