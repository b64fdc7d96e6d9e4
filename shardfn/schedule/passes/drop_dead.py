"""Drop nodes that nobody reads.

Collectives stay: whether one is needed is decided in the plan, for all ranks alike. A rank with
an empty shard may not read what it gathers, and must take part all the same.
"""

from __future__ import annotations

import torch

from ...capture.copying import copied
from ...ops.loops import Loop, inner_nodes
from ..agenda import Agenda

WAIT = torch.ops._c10d_functional.wait_tensor.default


def drop_dead(graph: torch.fx.Graph, agenda: Agenda) -> torch.fx.Graph:
    """The graph without the local ops that nobody reads."""
    if not any(_is_dead(node) for node in graph.nodes):
        return graph
    out = copied(graph)
    for node in reversed(out.nodes):
        if _is_dead(node):
            out.erase_node(node)
    return out


def _is_dead(node: torch.fx.Node) -> bool:
    only_checks = node.op == "call_function" and node.meta.get("val") is None
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
