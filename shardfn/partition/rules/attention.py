"""Scaled dot-product attention, CPU and CUDA variants, over batch and heads."""

from __future__ import annotations

import torch

from ..choice import Choice, OpCall, Rule, replicated

aten = torch.ops.aten
NAMES = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_cudnn_attention_backward",
)


def attention(call: OpCall) -> list[Choice]:
    """Batch and heads lead every tensor of the attention; a mask may broadcast them; RNG state has neither."""
    batch, heads = _lead(call)
    if call.arg(_dropout(call), "dropout_p", 0.0):
        return [replicated(call)]
    choices = [replicated(call)]
    for d, size in ((0, batch), (1, heads)):
        mark = lambda x, d=d, size=size: d if x.dim() >= 3 and x.shape[d] == size else "R"  # noqa: E731
        choices.append((tuple(map(mark, call.ins)), tuple(map(mark, call.outs))))
    return choices if _one_head_count(call, heads) else choices[:2]


def _lead(call: OpCall) -> tuple[int, int]:
    return call.ins[0].shape[0], call.ins[0].shape[1]


def _dropout(call: OpCall) -> int:
    names = [a.name for a in call.target._schema.arguments]
    return names.index("dropout_p")


def _one_head_count(call: OpCall, heads: int) -> bool:
    """Grouped queries have fewer key heads, which do not line up with a cut of the query heads."""
    return all(x.shape[1] == heads for x in call.ins if x.dim() == 4 and x.shape[1] != 1)


TABLE: dict[object, Rule] = {getattr(aten, name).default: attention for name in NAMES if hasattr(aten, name)}
