"""Strategies from a user's rule function. checked.py checks them, like those of every rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard

from .einsum import parsed
from .strategy import Choice, OpCall, Rule, replicated

# DTensor's placements -> the placements of `types.Mark`
MARKS: dict[type, Callable[[Any], Any]] = {
    Shard: lambda p: p.dim,
    Replicate: lambda p: "R",
    Partial: lambda p: p.reduce_op,
}


def from_function(fn: Callable[[OpCall], Any]) -> Rule:
    """The rule of a function that returns a text, or a list of (placements of the inputs,
    placements of the results).
    """

    def choices(call: OpCall) -> list[Choice]:
        said = fn(call)
        if isinstance(said, str):
            return parsed(said, ()).choices(call)
        return [replicated(call), *((_marks(ins), _marks(outs)) for ins, outs in said)]

    choices.__module__, choices.__qualname__ = (
        getattr(fn, "__module__", ""),
        getattr(fn, "__qualname__", repr(fn)),
    )
    return choices


def _marks(given: Any) -> tuple[Any, ...]:
    return tuple(MARKS[type(m)](m) if type(m) in MARKS else m for m in given)
