"""Compilation stage 3, schedule: the passes over the graph of one rank, in the order in which they
run. Each pass maps a graph to a new graph.

The SchedulePlan holds all decisions on which ranks must agree. Each pass applies a part of the
SchedulePlan to the graph of one rank.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from ..ops.graph_copies import copied
from ..ops.loops import Loop
from .check import check, check_plan, check_program
from .passes.bucket import bucket
from .passes.drop_dead import drop_dead
from .passes.merge_equal import merge_equal
from .passes.overlap import overlap
from .schedule_plan import SchedulePlan, plan_schedule

Pass = Callable[[torch.fx.Graph, SchedulePlan], torch.fx.Graph]
PIPELINE: tuple[Pass, ...] = (merge_equal, bucket, drop_dead, overlap)

__all__ = [
    "PIPELINE",
    "SchedulePlan",
    "plan_schedule",
    "bucket",
    "check",
    "check_plan",
    "check_program",
    "copied",
    "drop_dead",
    "merge_equal",
    "overlap",
    "schedule",
]


def schedule(graph: torch.fx.Graph, schedule_plan: SchedulePlan) -> list[torch.fx.Graph]:
    """Run every pass over a local graph, and check the graph after each.

    Returns:
        The graph before the first pass and after each.
    """
    graph = _inside_first(graph, schedule_plan)
    check(graph, schedule_plan.axes)
    graphs = [graph]
    for run in PIPELINE:
        made = run(graphs[-1], schedule_plan)
        if made is not graphs[-1]:
            check(made, schedule_plan.axes)
        graphs.append(made)
    return graphs


def _inside_first(graph: torch.fx.Graph, schedule_plan: SchedulePlan) -> torch.fx.Graph:
    """Schedule the bodies of loops, each by its own schedule."""
    if not any(isinstance(node.target, Loop) for node in graph.nodes):
        return graph
    out = copied(graph)
    for node in out.nodes:
        if isinstance(node.target, Loop):
            pairs = zip(node.target.graphs, node.meta["plans"], strict=True)
            inner = [schedule(g, schedule_plan.inside[plan])[-1] for g, plan in pairs]
            node.target = attrs.evolve(node.target, graphs=tuple(inner))
    return out
