"""Strategies from the rule function of a user. check_strategies.py checks them, like all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard

from .einsum import parsed
from .strategy import Choice, OpCall, Rule, replicated

# DTensor's placements -> the placements of `types.AxisPlacement`
FROM_DTENSOR: dict[type, Callable[[Any], Any]] = {
    Shard: lambda p: p.dim,
    Replicate: lambda p: "R",
    Partial: lambda p: p.reduce_op,
}


def from_function(fn: Callable[[OpCall], Any]) -> Rule:
    """Turn a user's function into a rule; it returns an einsum-like text or a list of
    strategies.
    """

    def choices(call: OpCall) -> list[Choice]:
        said = fn(call)
        if isinstance(said, str):
            return parsed(said, ()).choices(call)
        return [replicated(call), *((_placements(ins), _placements(outs)) for ins, outs in said)]

    choices.__module__, choices.__qualname__ = (
        getattr(fn, "__module__", ""),
        getattr(fn, "__qualname__", repr(fn)),
    )
    return choices


def _placements(given: Any) -> tuple[Any, ...]:
    """Convert DTensor placements to those of rules."""
    return tuple(FROM_DTENSOR[type(m)](m) if type(m) in FROM_DTENSOR else m for m in given)
