"""The cost of ops that a compiler fuses: an element-by-element op reads and writes what no other
such op has in its registers.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from ...hardware import H100, Hardware
from .. import rules
from ..planner import work


def in_bytes(node: torch.fx.Node, hardware: Hardware = H100) -> float:
    """The time of one op on one device, in bytes that a rank of an H100 sends in that time."""
    if not is_fused(node):
        return work.in_bytes(node, hardware)
    read = sum(
        work.nbytes(x.meta.get("val"))
        for x in node.all_input_nodes
        if not is_fused(x) and _first_fused(x.users) is node
    )
    is_kept = not all(map(is_fused, node.users))
    written = work.nbytes(node.meta["val"]) if is_kept else 0
    return (read + written) / hardware.memory * H100.link


def is_fused(node: torch.fx.Node) -> bool:
    """Whether a compiler fuses an op with the others around it."""
    return node.op == "call_function" and rules.is_pointwise(node.target)


def _first_fused(users: Collection[torch.fx.Node]) -> torch.fx.Node | None:
    return next((user for user in users if is_fused(user)), None)
