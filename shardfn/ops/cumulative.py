"""Cumulative ops from the last element of a dim to the first. The gradient of a cumulative sum is
one; torch writes it as a flip before and a flip after, which name no dim to be sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
_library = torch.library.Library("shardfn", "FRAGMENT")


def _reverse(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Make the reverse of a cumulative op."""

    def reverse(x: torch.Tensor, dim: int) -> torch.Tensor:
        return aten.flip.default(op(aten.flip.default(x, [dim]), dim), [dim])

    return reverse


def _define(name: str, op: Callable[..., torch.Tensor]) -> Any:
    """Define the op in our namespace."""
    _library.define(f"{name}(Tensor x, int dim) -> Tensor")
    _library.impl(name, _reverse(op), "CompositeImplicitAutograd")
    return getattr(torch.ops.shardfn, name).default


REVERSED = {
    aten.cumsum.default: _define("reverse_cumsum", aten.cumsum.default),
    aten.logcumsumexp.default: _define("reverse_logcumsumexp", aten.logcumsumexp.default),
}  # a cumulative op -> its reverse
