"""Remove collectives over axes of size 1."""

from __future__ import annotations

import torch

from ...capture.copying import copied
from ..agenda import Agenda


def elide_size_one(graph: torch.fx.Graph, agenda: Agenda) -> torch.fx.Graph:
    """The graph with each such collective, and its wait, replaced by its input."""
    if all(n > 1 for n in agenda.axes.sizes):
        return graph
    out = copied(graph)
    sizes = dict(zip(agenda.axes.names, agenda.axes.sizes, strict=True))
    for node in list(out.nodes):
        record = node.meta.get("collective")
        if record is None or sizes[record.axis] > 1:
            continue
        (wait,) = node.users
        wait.replace_all_uses_with(node.args[0])
        out.erase_node(wait)
        out.erase_node(node)
    return out
