"""The cost of an op beside its collectives: its arithmetic and its memory traffic."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from ...hardware import H100, Hardware
from ...ops.loops import Loop, Scan, While
from .. import rules

# A while loop counts as so many turns: how many it takes depends on values.
TURNS = 8
WAIT = torch.ops._c10d_functional.wait_tensor.default


def seconds(node: Node, hardware: Hardware) -> float:
    """Estimate the time of one op on one device, from shapes and hardware figures."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    # a gradient that is not needed is None
    first = next((x for x in values if isinstance(x, torch.Tensor)), None)
    if first is None or is_alias(node):
        return 0.0
    return hardware.compute(flops(node), traffic(node), first.dtype)


def in_bytes(node: Node, hardware: Hardware = H100) -> float:
    """Estimate the time of one op on one device, in bytes that a rank of an H100 sends
    meanwhile.
    """
    return seconds(node, hardware) * H100.link


def is_alias(node: Node) -> bool:
    """Return whether a node is a view of another one."""
    if node.target in (WAIT, operator.getitem):
        return True
    return getattr(node.target, "is_view", False)


def traffic(node: Node) -> int:
    """Return the bytes that an op reads and writes."""
    read = sum(nbytes(x.meta.get("val")) for x in node.all_input_nodes)
    return nbytes(node.meta["val"]) + read


def flops(node: Node) -> float:
    """Count the floating-point operations of a product, convolution or attention; 0 for other
    ops.
    """
    values = lambda x: torch.fx.node.map_arg(x, lambda n: n.meta["val"])
    own = OWN.get(rules.name_of(node.target))
    if own is not None:
        return own(*values(node.args))
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0.0
    kwargs = values(node.kwargs)
    return float(formula(*values(node.args), **kwargs, out_val=node.meta["val"]))


def _attention(q: Any, k: Any, v: Any, *_: Any) -> float:
    """Count the flops of attention: queries times keys, and weights times values."""
    pairs = _pairs(q, k)
    width = q.shape[-1]
    of_values = v.shape[-1]
    return 2 * pairs * (width + of_values)


def _attention_backward(_: Any, q: Any, k: Any, v: Any, *others: Any) -> float:
    """Count the flops of attention's backward: five products."""
    pairs = _pairs(q, k)
    width = q.shape[-1]
    of_values = v.shape[-1]
    return 2 * pairs * (3 * width + 2 * of_values)


def _pairs(q: Any, k: Any) -> float:
    """Count the pairs of a query and a key."""
    queries = math.prod(q.shape[:-1])
    keys = k.shape[-2]
    return float(queries * keys)


def _grouped(x: Any, w: Any, *_: Any) -> float:
    """Count the flops of a grouped matrix product."""
    columns = w.shape[-1]
    if x.dim() == w.dim() == 3:
        return 2.0 * x.numel() * columns
    rows, terms = x.shape[-2:]
    return 2.0 * rows * terms * columns


def _fallback_backward(x: Any, w: Any, *_: Any) -> float:
    """Count the flops of both gradients of a grouped product."""
    return 2 * _grouped(x, w)


def _vectors(x: Any, _: Any) -> float:
    """Count the flops of a product with a vector."""
    return 2.0 * x.numel()


# by the names of ops that torch's own counter does not know
OWN: dict[str, Callable[..., float]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten::_grouped_mm": _grouped,
    "aten::mv": _vectors,
    "aten::dot": _vectors,
    "transformers::grouped_mm_fallback": _grouped,
    "transformers::grouped_mm_fallback_backward": _fallback_backward,
}


def nbytes(value: Any) -> int:
    """Return the bytes of a tensor, or of a tuple of tensors."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    return sum(x.numel() * x.element_size() for x in values if isinstance(x, torch.Tensor))


def turns(loop: Loop) -> int:
    """Return how often a loop's body counts in a price: the length of a scan, 8 for a while
    loop.
    """
    if isinstance(loop, Scan):
        return max(loop.length, 1)
    if isinstance(loop, While):
        return TURNS
    return 1
