"""The cost of an op beside its collectives: its arithmetic and its memory traffic."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from ...capture.annotations import RECOMPUTED
from ...collectives import ALL_GATHER
from ...hardware import H100, SENT, Hardware
from ...ops.loops import Loop, Scan, While
from .. import rules

# A while loop counts as so many turns: how many it takes depends on values.
TURNS = 8
# the fused attentions, with the place of their argument `is_causal`
ATTENTION = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": 4,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": 7,
    "aten::_scaled_dot_product_flash_attention": 4,
    "aten::_scaled_dot_product_flash_attention_backward": 11,
    "aten::_scaled_dot_product_efficient_attention": 6,
    "aten::_scaled_dot_product_efficient_attention_backward": 11,
    "aten::_scaled_dot_product_cudnn_attention": 6,
    "aten::_scaled_dot_product_cudnn_attention_backward": 14,
    "aten::_scaled_dot_product_fused_attention_overrideable": 5,
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": 13,
}
WAIT = torch.ops._c10d_functional.wait_tensor.default
COPIES = {torch.ops.aten.clone.default, torch.ops.aten.cat.default}  # of gathered values
IN_16_BITS = {torch.bfloat16, torch.float16}


def seconds(node: Node, hardware: Hardware) -> float:
    """Estimate the time of one op on one device, from shapes and hardware figures."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    # a gradient that is not needed is None
    first = next((x for x in values if isinstance(x, torch.Tensor)), None)
    if first is None or is_alias(node):
        return 0.0
    count, moved = flops(node), traffic(node)
    if hardware.float8 and count and first.dtype.itemsize == 2 and not is_attention(node):
        return _float8_seconds(node, count, hardware)
    return hardware.compute(count, moved, first.dtype, is_attention=is_attention(node))


def _float8_seconds(node: Node, count: float, hardware: Hardware) -> float:
    """Estimate the time of a product of 16 bits that runs in 8: each operand is read for its
    greatest value, read again and written in 8 bits; the product reads that. Products of one
    phase that read the same value share its cast. What products alone gather is cast before.
    """
    inputs = node.all_input_nodes
    moved = sum(nbytes(x.meta.get("val")) for x in inputs) / 2 + nbytes(node.meta["val"])
    to_cast = sum(2.5 * _cast_bytes(x) / _readers(x, node) for x in inputs)
    cast = hardware.compute(0.0, to_cast, torch.bfloat16)
    return cast + hardware.compute(count, moved, torch.float8_e4m3fn)


def is_gathered_in_8_bits(node: Node) -> bool:
    """Return whether an op gathers a value of 16 bits that products alone read, so that a program
    whose products run in 8 bits casts it before.
    """
    record = node.meta.get("collective")
    if record is None or record.kind != ALL_GATHER or node.meta["val"].dtype not in IN_16_BITS:
        return False
    readers, queue = [], [node]
    while queue:
        for user in queue.pop().users:
            (queue if _is_copy(user) else readers).append(user)
    return bool(readers) and all(x.op == "call_function" and _products(x) > 0 for x in readers)


def _cast_bytes(x: Node) -> float:
    """Return the bytes of an operand that a rank casts: of one that is gathered, its shard."""
    while _is_copy(x):
        x = x.all_input_nodes[0]
    own = x.all_input_nodes[0] if is_gathered_in_8_bits(x) else x
    return nbytes(own.meta.get("val"))


def _is_copy(node: Node) -> bool:
    """Return whether a node is a view, or a copy in another order of its elements."""
    return node.op == "call_function" and (is_alias(node) or node.target in COPIES)


def _readers(x: Node, product: Node) -> int:
    """Count the products that read a value, also through views, in the phase of one of them."""
    while x.op == "call_function" and is_alias(x):
        x = x.all_input_nodes[0]
    phase, count, queue = product.meta.get("phase"), 0, [x]
    while queue:
        for user in queue.pop().users:
            if user.op == "call_function" and is_alias(user):
                queue.append(user)
            else:
                count += user.meta.get("phase") == phase and _products(user) > 0
    return max(count, 1)


def in_bytes(node: Node, hardware: Hardware = H100) -> float:
    """Estimate the time of one op on one device, in bytes that a rank of an H100 sends
    meanwhile.
    """
    return seconds(node, hardware) * SENT


def is_alias(node: Node) -> bool:
    """Return whether a node is a view of another one."""
    if node.target in (WAIT, operator.getitem, torch.ops.aten._unsafe_view.default):
        return True
    return getattr(node.target, "is_view", False)


def traffic(node: Node) -> int:
    """Return the bytes that an op reads and writes."""
    read = sum(nbytes(x.meta.get("val")) for x in node.all_input_nodes)
    return nbytes(node.meta["val"]) + read


def flops(node: Node) -> float:
    """Count the floating-point operations of a product, convolution or attention; 0 for other
    ops. A causal attention over as many keys as queries runs half of its pairs.
    """
    if is_attention(node):
        products = 5 if _is_backward(node) else 2
        return _attention(node, products) * (0.5 if is_causal(node) else 1.0)
    return _products(node)


def model_flops(node: Node) -> float:
    """Count the operations that a model needs. A recomputation is not needed."""
    return 0.0 if is_recomputed(node) else flops_as_published(node)


def flops_as_published(node: Node) -> float:
    """Count operations as papers do: all pairs of a causal attention, and four products in its
    backward, which runs five.
    """
    if is_attention(node):
        return _attention(node, 4 if _is_backward(node) else 2)
    return _products(node)


def is_recomputed(node: Node) -> bool:
    """Return whether an op of a rank's program, or of the global one, computes a value again."""
    return bool(node.meta.get("is_recomputed")) or RECOMPUTED in (node.meta.get("custom") or {})


def _products(node: Node) -> float:
    """Count the operations of an op that is no attention."""
    values = lambda x: torch.fx.node.map_arg(x, lambda n: n.meta["val"])
    own = OWN.get(rules.name_of(node.target))
    if own is not None:
        return own(*values(node.args))
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0.0
    kwargs = values(node.kwargs)
    return float(formula(*values(node.args), **kwargs, out_val=node.meta["val"]))


def is_attention(node: Node) -> bool:
    """Return whether an op is a fused attention, or its backward."""
    return rules.name_of(node.target) in ATTENTION


def is_causal(node: Node) -> bool:
    """Return whether an attention runs half of its pairs: those of a query and earlier keys."""
    q, k, _ = _operands(node)
    place = ATTENTION[rules.name_of(node.target)]
    given = node.args[place] if place < len(node.args) else node.kwargs.get("is_causal")
    return bool(given) and q.shape[-2] == k.shape[-2]


def _is_backward(node: Node) -> bool:
    """Return whether an attention is a backward."""
    return rules.name_of(node.target).endswith("_backward")


def _operands(node: Node) -> list[torch.Tensor]:
    """Return the queries, keys and values of an attention. The cotangent stands before them."""
    first = 1 if _is_backward(node) else 0
    operands: Any = node.args[first : first + 3]
    return [x.meta["val"] for x in operands]


def _attention(node: Node, products: int) -> float:
    """Count the operations of some products of attention, half of them as wide as the keys: of
    five, three.
    """
    q, k, v = _operands(node)
    pairs = math.prod(q.shape[:-1]) * k.shape[-2]
    of_values = products // 2
    return 2.0 * pairs * ((products - of_values) * q.shape[-1] + of_values * v.shape[-1])


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


def _flex_attention(q: Any, k: Any, v: Any, *_: Any) -> float:
    """Count the flops of flex attention where its mask hides nothing."""
    pairs = q.shape[:-1].numel() * k.shape[-2]
    return 2.0 * pairs * (k.shape[-1] + v.shape[-1])


def _vectors(x: Any, _: Any) -> float:
    """Count the flops of a product with a vector."""
    return 2.0 * x.numel()


def _convolution(
    x: Any, w: Any, _: Any, stride: Any, before: Any, after: Any, dilation: Any, groups: int
) -> float:
    """Count the flops of a convolution."""
    sizes = zip(x.shape[2:], w.shape[2:], stride, before, after, dilation, strict=True)
    rows = [(n + b + a - d * (k - 1) - 1) // s + 1 for n, k, s, b, a, d in sizes]
    return 2.0 * x.shape[0] * math.prod(rows) * w.numel()


def _convolution_backward(g: Any, x: Any, w: Any, *others: Any) -> float:
    """Count the flops of the gradients of a convolution."""
    rows = g.numel() / max(g.shape[1], 1)
    return sum(others[-1][:2]) * 2.0 * rows * w.numel()


# by the names of ops that torch's own counter does not know
OWN: dict[str, Callable[..., float]] = {
    "aten::_grouped_mm": _grouped,
    "aten::mv": _vectors,
    "aten::dot": _vectors,
    "shardfn::padded_convolution": _convolution,
    "shardfn::padded_convolution_backward": _convolution_backward,
    "flex_attention": _flex_attention,
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
