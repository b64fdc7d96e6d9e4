"""The cost of an op beside its collectives: its arithmetic and its memory traffic."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from ...hardware import H100, Hardware
from ...ops.loops import Loop, Scan, While

# A while loop counts as so many turns: how many it takes depends on values.
TURNS = 8
WAIT = torch.ops._c10d_functional.wait_tensor.default


def seconds(node: Node, hardware: Hardware) -> float:
    """The time of one op on one device, from the shapes of its node."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    # a gradient that is not needed is None
    first = next((x for x in values if isinstance(x, torch.Tensor)), None)
    if first is None or is_alias(node):
        return 0.0
    return hardware.compute(flops(node), traffic(node), first.dtype)


def in_bytes(node: Node, hardware: Hardware = H100) -> float:
    """The time of one op on one device, in bytes that a rank of an H100 sends in that time."""
    return seconds(node, hardware) * H100.link


def is_alias(node: Node) -> bool:
    """Whether a node is a view of another one."""
    if node.target in (WAIT, operator.getitem):
        return True
    return getattr(node.target, "is_view", False)


def traffic(node: Node) -> int:
    """The bytes that an op reads and writes."""
    read = sum(nbytes(x.meta.get("val")) for x in node.all_input_nodes)
    return nbytes(node.meta["val"]) + read


def flops(node: Node) -> float:
    """The floating-point operations of a product, a convolution or an attention; 0 for others."""
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0.0
    args, kwargs = torch.fx.node.map_arg(
        (node.args, node.kwargs), lambda n: n.meta["val"]
    )
    return float(formula(*args, **kwargs, out_val=node.meta["val"]))


def nbytes(value: Any) -> int:
    """The bytes of a tensor, or of a tuple of them."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    return sum(
        x.numel() * x.element_size() for x in values if isinstance(x, torch.Tensor)
    )


def turns(loop: Loop) -> int:
    """How often the bodies of a loop run, as far as a price is concerned."""
    if isinstance(loop, Scan):
        return max(loop.length, 1)
    if isinstance(loop, While):
        return TURNS
    return 1
