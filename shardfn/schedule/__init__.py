"""Stage 3, schedule: passes over the local graph, each `graph -> graph`, in the order in which
they run.

The agenda holds all decisions on which ranks must agree. Each pass applies a part of it to one
rank's graph.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from ..capture.graph_copies import copied
from ..ops.loops import Loop
from .agenda import Agenda, agenda
from .check import check
from .passes.bucket import bucket
from .passes.drop_dead import drop_dead
from .passes.merge_equal import merge_equal
from .passes.overlap import overlap

Pass = Callable[[torch.fx.Graph, Agenda], torch.fx.Graph]
PIPELINE: tuple[Pass, ...] = (merge_equal, bucket, drop_dead, overlap)

__all__ = [
    "PIPELINE",
    "Agenda",
    "agenda",
    "bucket",
    "check",
    "copied",
    "drop_dead",
    "merge_equal",
    "overlap",
    "schedule",
]


def schedule(graph: torch.fx.Graph, agenda: Agenda) -> list[torch.fx.Graph]:
    """Run every pass, and check the graph before the first and after each that changes it.

    Returns:
        The graph before the first pass and after each.
    """
    graph = _inside_first(graph, agenda)
    check(graph, agenda.axes)
    graphs = [graph]
    for run in PIPELINE:
        made = run(graphs[-1], agenda)
        if made is not graphs[-1]:
            check(made, agenda.axes)
        graphs.append(made)
    return graphs


def _inside_first(graph: torch.fx.Graph, agenda: Agenda) -> torch.fx.Graph:
    """The graph with scheduled loop bodies, each by an agenda of its own."""
    if not any(isinstance(node.target, Loop) for node in graph.nodes):
        return graph
    out = copied(graph)
    for node in out.nodes:
        if isinstance(node.target, Loop):
            pairs = zip(node.target.graphs, node.meta["plans"], strict=True)
            inner = [schedule(g, agenda.inside[plan])[-1] for g, plan in pairs]
            node.target = attrs.evolve(node.target, graphs=tuple(inner))
    return out
