"""Constant tensors of one value: each rank makes its shard, for any placement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import deterministic

from .. import layout
from ..layout import AxisPlacement

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
}
UNSET = {  # ops that leave the values open
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.empty_strided.default,
    aten.new_empty_strided.default,
    aten.empty_permuted.default,
}

LIKE = {
    aten.full_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
}  # ops that take the shape of a tensor


def fill_value(target: object, args: tuple[Any, ...], dtype: torch.dtype) -> Any:
    """Return the number that a call fills a tensor with; None if the op is not a fill.

    Args:
        target: the op.
        args: its arguments.
        dtype: of the tensor.
    """
    if target in UNSET:
        return _unset(dtype)
    return FILLS[target](args) if target in FILLS else None


def _unset(dtype: torch.dtype) -> Any:
    """Return the fill of an uninitialised tensor: zero, or what deterministic algorithms
    promise.
    """
    is_promised = torch.are_deterministic_algorithms_enabled()
    if not (is_promised and deterministic.fill_uninitialized_memory):
        return 0
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def fits(value: Any, placement: AxisPlacement) -> bool:
    """Return whether a fill may have a placement. Only zeros may be a Partial sum or have a halo,
    which is zero beyond the ends of the dim.
    """
    return value == 0 or (placement != "sum" and not any(layout.halo(placement)))
