"""Drop nodes that nobody reads.

Collectives stay: whether one is needed is decided in the plan, for all ranks alike. A rank with an empty shard may not
read what it gathers, and must take part all the same.
"""

from __future__ import annotations

import torch

from ..types import MeshAxes
from ._copy import copied

WAIT = torch.ops._c10d_functional.wait_tensor.default


def drop_dead(graph: torch.fx.GraphModule, axes: MeshAxes) -> torch.fx.GraphModule:
    """The graph without the local ops that nobody reads."""
    out = copied(graph)
    for node in reversed(out.graph.nodes):
        if node.op == "call_function" and not node.users and node.target is not WAIT:
            out.graph.erase_node(node)
    out.recompile()
    return out

