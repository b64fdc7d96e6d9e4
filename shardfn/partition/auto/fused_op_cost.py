"""The cost of ops that a compiler fuses: an element-by-element op reads and writes what no other
such op has in its registers.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from ...hardware import H100, SENT, Hardware
from .. import rules
from ..planner import op_cost


def in_bytes(node: torch.fx.Node, hardware: Hardware = H100) -> float:
    """Estimate the time of one op after pointwise fusion, in bytes that a rank of an H100 sends
    meanwhile.
    """
    if not is_fused(node):
        return op_cost.in_bytes(node, hardware)
    read = sum(
        op_cost.nbytes(x.meta.get("val"))
        for x in node.all_input_nodes
        if not is_fused(x) and _first_fused(x.users) is node
    )
    is_kept = not all(map(is_fused, node.users))
    written = op_cost.nbytes(node.meta["val"]) if is_kept else 0
    return hardware.compute(0.0, read + written, torch.uint8) * SENT


def is_fused(node: torch.fx.Node) -> bool:
    """Return whether a compiler fuses this op with its neighbours: it is pointwise."""
    return node.op == "call_function" and rules.is_pointwise(node.target)


def _first_fused(users: Collection[torch.fx.Node]) -> torch.fx.Node | None:
    """Return the first reader that a compiler fuses; None if there is none."""
    return next((user for user in users if is_fused(user)), None)
