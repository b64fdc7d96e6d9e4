"""Scaled dot-product attention, CPU and CUDA variants, sharded over batch and heads."""

from __future__ import annotations

import torch

from ... import _compat
from ...types import AxisPlacement
from .. import layout
from ..rule_api.op_record import Op
from ..rule_api.strategy import Choice, OpCall, replicated

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
    """Shard attention over batch or heads, with grouped queries too."""
    batch = call.ins[0].shape[0]
    heads = call.ins[0].shape[1]
    mask = _mask(call)
    if call.arg(_position(call, "dropout_p"), "dropout_p", 0.0) or (
        mask is not None and mask.dim() == 3
    ):
        return [replicated(call)]
    by_batch = _placements(call.ins, 0, {batch: 1}), _placements(call.outs, 0, {batch: 1})
    groups = _groups(call, heads)
    if groups is None:
        return [replicated(call), by_batch]
    by_head = _placements(call.ins, 1, groups), _placements(call.outs, 1, groups)
    return [replicated(call), by_batch, by_head]


def _placements(
    tensors: tuple[torch.Tensor, ...], d: int, units: dict[int, int]
) -> tuple[AxisPlacement, ...]:
    """Shard a dim of each tensor that has one of the given sizes, in the unit of that size."""
    return tuple(
        layout.joined(d, units[x.shape[d]]) if x.dim() >= 3 and x.shape[d] in units else "R"
        for x in tensors
    )


def _position(call: OpCall, *names: str) -> int:
    """Return the position of an argument in an op's schema."""
    return next(i for i, a in enumerate(_compat.schema(call.target).arguments) if a.name in names)


def _mask(call: OpCall) -> torch.Tensor | None:
    """Return the attention mask of a call; None without one."""
    names = {"attn_mask", "attn_bias"} & {a.name for a in _compat.schema(call.target).arguments}
    found = [call.arg(_position(call, name), name) for name in names]
    return found[0].meta["val"] if found and found[0] is not None else None


def _groups(call: OpCall, heads: int) -> dict[int, int] | None:
    """Return the units in which query heads and key heads are sharded together; None if they
    cannot be.

    A mask may have one head for all.
    """
    mask = _mask(call)
    sizes = {x.shape[1] for x in call.ins if x.dim() == 4 and x is not mask}
    few = min(sizes)
    if sizes == {heads}:
        return {heads: 1}
    if sizes != {heads, few} or few == 1 or heads % few:
        return None
    return {heads: heads // few, few: 1}


TABLE: dict[object, Op] = {
    getattr(aten, name).default: Op(attention, strided=True, of_sizes=True)
    for name in NAMES
    if hasattr(aten, name)
}
