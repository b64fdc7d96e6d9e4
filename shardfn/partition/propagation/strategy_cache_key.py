"""Equal ops: calls of one op on values of equal sizes, numbers and placements. The layers of a
model repeat, so most ops of a program are like an earlier one, and so is their strategy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .. import plan, rules
from ..rule_api.strategy import OpCall
from .values import Value


def strategy_cache_key(
    call: OpCall,
    values: Sequence[Value],
    held: Iterable[Sequence[plan.Slot]],
    is_term: Sequence[bool],
) -> tuple[Any, ...] | None:
    """Return a key that is equal for ops with equal strategies: op, numbers, sizes and input
    placements; None if it needs more.

    Args:
        call: the op.
        values: its inputs.
        held: their slots that a strategy may read.
        is_term: for each mesh axis, whether the terms of the result are read.
    """
    if not rules.follows_sizes(call.target):
        return None
    arguments: list[Any] = [call.target, *is_term]
    if not _described((call.args, call.kwargs), arguments):
        return None
    sizes = [_sizes(x) for x in (*call.ins, *call.outs)]
    if None in sizes:
        return None
    first = [next(k for k, x in enumerate(values) if x is v) for v in values]
    states = map(_state, values, held)
    return (*arguments, *sizes, *first, *states)


def _described(argument: Any, parts: list[Any]) -> bool:
    """Append the numbers of a call to a key. Returns False if one is symbolic."""
    if isinstance(argument, (list, tuple)):
        parts.append(len(argument))
        return all(_described(item, parts) for item in argument)
    if isinstance(argument, dict):
        parts.extend(argument)
        return all(_described(item, parts) for item in argument.values())
    if isinstance(argument, torch.SymInt | torch.SymFloat | torch.SymBool):
        return False
    parts.append(type(argument))  # 1 is equal to 1.0, and to True
    if not isinstance(argument, torch.fx.Node):
        parts.append(argument)
    return True


def _sizes(x: torch.Tensor) -> tuple[Any, ...] | None:
    """Return the sizes, strides and dtype of a tensor; None if a size is symbolic."""
    if x._has_symbolic_sizes_strides:
        return None
    return x.shape, x.stride(), x.dtype


def _state(value: Value, slots: Sequence[plan.Slot]) -> tuple[Any, ...]:
    """Return what the price of a value depends on: its slots, readers and constants."""
    fill = None if value.fill is None else value.fill[1]
    placements = tuple(slot.placements for slot in slots)
    is_shared = value.users > 1
    made = value.recipe is not None, value.fill is not None, type(fill), fill
    return placements, is_shared, value.early, value.varies, *made
