"""Drop unread nodes.

Collectives stay, since the plan decides for all ranks alike whether one is needed. A rank with
an empty shard may not read the result of a gather, but must take part in it. A pipeline stays too:
a coordinate with no result of its own sends to others.
"""

from __future__ import annotations

import torch

from ...ops.debug import has_effect
from ...ops.graph_copies import copied
from ...ops.loops import Loop, inner_nodes
from ...ops.pipeline import Pipeline
from ..schedule_plan import SchedulePlan

WAIT = torch.ops._c10d_functional.wait_tensor.default


def drop_dead(graph: torch.fx.Graph, schedule_plan: SchedulePlan) -> torch.fx.Graph:
    """Remove local ops that nothing reads; collectives stay, since all ranks take part."""
    if not any(_is_dead(node) for node in graph.nodes):
        return graph
    out = copied(graph)
    for node in reversed(out.nodes):
        if _is_dead(node):
            out.erase_node(node)
    return out


def _is_dead(node: torch.fx.Node) -> bool:
    """Return whether a node may be removed."""
    only_checks = node.op == "call_function" and node.meta.get("val") is None
    if has_effect(node) or isinstance(node.target, Pipeline):
        return False
    if isinstance(node.target, Loop) and any(
        "collective" in inner.meta
        for g in node.target.graphs
        for inner in inner_nodes(g, once=True)
    ):
        return False
    return (
        node.op == "call_function"
        and not node.users
        and node.target is not WAIT
        and not only_checks
    )
