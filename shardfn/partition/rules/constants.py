"""Constant tensors of one value: each rank makes its shard, for any placement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

# op -> how its call gives the value
FILLS: dict[object, Callable[[tuple[Any, ...]], Any]] = {
    aten.full.default: lambda args: args[1],
    aten.full_like.default: lambda args: args[1],
    aten.new_full.default: lambda args: args[2],
    aten.scalar_tensor.default: lambda args: args[0],
    aten.zeros.default: lambda args: 0,
    aten.zeros_like.default: lambda args: 0,
    aten.new_zeros.default: lambda args: 0,
    aten.ones.default: lambda args: 1,
    aten.ones_like.default: lambda args: 1,
    aten.new_ones.default: lambda args: 1,
    aten.empty.memory_format: lambda args: 0,
    aten.empty_like.default: lambda args: 0,
    aten.new_empty.default: lambda args: 0,
    aten.empty_strided.default: lambda args: 0,
    aten.new_empty_strided.default: lambda args: 0,
    aten.empty_permuted.default: lambda args: 0,
}

LIKE = {
    aten.full_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
}  # ops that take the shape of a tensor


def fill_value(target: object, args: tuple[Any, ...]) -> Any:
    """The value that a call fills a tensor with, or None if the op is not a fill."""
    return FILLS[target](args) if target in FILLS else None


def fits(value: Any, mark: object) -> bool:
    """Whether a fill may have a placement. Zeros may also be a Partial sum."""
    return mark != "sum" or value == 0
