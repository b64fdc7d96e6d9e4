"""Take out collectives over an axis of size 1: there is nobody to talk to."""

from __future__ import annotations

import torch

from ..types import MeshAxes
from ._copy import copied


def elide_size_one(graph: torch.fx.GraphModule, axes: MeshAxes) -> torch.fx.GraphModule:
    """The graph with each such collective, and its wait, replaced by its input."""
    out, sizes = copied(graph), dict(zip(axes.names, axes.sizes, strict=True))
    for node in list(out.graph.nodes):
        record = node.meta.get("collective")
        if record is None or sizes[record.axis] > 1:
            continue
        (wait,) = node.users
        wait.replace_all_uses_with(node.args[0])
        out.graph.erase_node(wait)
        out.graph.erase_node(node)
    out.recompile()
    return out
