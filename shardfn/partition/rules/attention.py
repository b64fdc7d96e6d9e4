"""Scaled dot-product attention, CPU and CUDA variants, sharded over batch and heads."""

from __future__ import annotations

import torch

from ... import _compat
from ...types import Mark
from ..rule_api.strategy import Choice, OpCall, Rule, replicated

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
    """Shards batch and heads, the leading dims of every tensor. A mask may broadcast them. The
    RNG state is replicated.
    """
    batch = call.ins[0].shape[0]
    heads = call.ins[0].shape[1]
    mask = _mask(call)
    if call.arg(_position(call, "dropout_p"), "dropout_p", 0.0) or (
        mask is not None and mask.dim() == 3
    ):
        return [replicated(call)]
    choices = [replicated(call)]
    for d, size in ((0, batch), (1, heads)):
        choices.append((_marks(call.ins, d, size), _marks(call.outs, d, size)))
    return choices if _one_head_count(call, heads) else choices[:2]


def _marks(
    tensors: tuple[torch.Tensor, ...], d: int, size: int
) -> tuple[Mark, ...]:
    return tuple(
        d if x.dim() >= 3 and x.shape[d] == size else "R" for x in tensors
    )


def _position(call: OpCall, *names: str) -> int:
    return next(
        i
        for i, a in enumerate(_compat.schema(call.target).arguments)
        if a.name in names
    )


def _mask(call: OpCall) -> torch.Tensor | None:
    names = {"attn_mask", "attn_bias"} & {
        a.name for a in _compat.schema(call.target).arguments
    }
    found = [call.arg(_position(call, name), name) for name in names]
    return found[0].meta["val"] if found and found[0] is not None else None


def _one_head_count(call: OpCall, heads: int) -> bool:
    """Whether all tensors have the same number of heads. Grouped queries have fewer key heads,
    which do not line up with shards of the query heads. A mask may have one head for all.
    """
    mask = _mask(call)
    return all(
        x.shape[1] == heads for x in call.ins if x.dim() == 4 and x is not mask
    )


TABLE: dict[object, Rule] = {
    getattr(aten, name).default: attention for name in NAMES if hasattr(aten, name)
}
