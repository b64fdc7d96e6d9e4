"""The arguments and results of attention ops by name, and the factors of their dims.

The kernels of CPU and CUDA name and order them differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .... import _compat
from ....ops.higher_order import HigherOrder
from ...rule_api.einsum import in_owners, tensor_arguments
from ...rule_api.strategy import OpCall

# A dim is a factor: b batch, h query heads, g key heads, t queries, s keys.
Factors = tuple[str | None, ...]
OF_QUERIES: Factors = ("b", "h", "t")
OF_KEYS: Factors = ("b", "g", "s")
# The keys of a mask are never sharded.
OF_MASK: Factors = ("b", "h", "t", None)
FACTORS: Mapping[str, Factors] = {
    "query": OF_QUERIES,
    "key": OF_KEYS,
    "value": OF_KEYS,
    "grad_out": OF_QUERIES,
    "grad_out_": OF_QUERIES,
    "out": OF_QUERIES,
    "logsumexp": OF_QUERIES,
    "attn_mask": OF_MASK,
    "attn_bias": OF_MASK,
}
MASKS = ("attn_mask", "attn_bias")
RESULTS: tuple[Factors, ...] = (OF_QUERIES, OF_QUERIES)
GRADIENTS: tuple[Factors, ...] = (OF_QUERIES, OF_KEYS, OF_KEYS, OF_MASK)


def names_of(target: Any) -> tuple[str, ...]:
    """List the names of an op's arguments."""
    return tuple(a.name for a in _compat.schema(target).arguments)


def mask_name(target: Any) -> str | None:
    """Return the name of an op's mask or bias argument; None if it has none."""
    return next((name for name in MASKS if name in names_of(target)), None)


def is_backward(target: Any) -> bool:
    """Return whether an op is the backward of attention."""
    return "logsumexp" in names_of(target)


def tensors_by_name(call: OpCall) -> dict[str, torch.Tensor]:
    """Return the tensor arguments of a call by name; of flex attention the first three."""
    if isinstance(call.target, HigherOrder):
        return dict(zip(FACTORS, call.ins, strict=False))
    names = tensor_arguments(call.target)
    owners = (names[owner] for owner in in_owners(call))
    return dict(zip(owners, call.ins, strict=True))


def factors_in(call: OpCall) -> list[Factors]:
    """For each tensor argument of a call, list the factors of its dims."""
    return [_matched(FACTORS.get(name, ()), x) for name, x in tensors_by_name(call).items()]


def factors_out(call: OpCall) -> list[Factors]:
    """For each tensor that a call returns, list the factors of its dims."""
    rows = RESULTS
    if is_backward(call.target):
        wanted = call["grad_input_mask"] if "grad_input_mask" in names_of(call.target) else ()
        rows = (
            GRADIENTS
            if not wanted
            else tuple(row for row, is_wanted in zip(GRADIENTS, wanted, strict=True) if is_wanted)
        )
    rest: tuple[Factors, ...] = ((),) * (len(call.outs) - len(rows))
    return [_matched(row, x) for row, x in zip((*rows, *rest), call.outs, strict=False)]


def _matched(row: Factors, x: torch.Tensor) -> Factors:
    """Match factors to the dims of a tensor: those of a mask from the last, without dims of
    size 1.
    """
    if row is not OF_MASK:
        return row
    own = row[len(row) - x.dim() :]
    return tuple(f if n != 1 else None for f, n in zip(own, x.shape, strict=True))
