"""Wire formats for dtypes that Gloo does not carry: complex values as pairs, others as bytes or
in a wider dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .graph_builder import Builder

aten = torch.ops.aten
CARRIED = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
}

Packed = tuple[torch.fx.Node, Callable[[torch.fx.Node], torch.fx.Node]]


def packed(b: Builder, x: torch.fx.Node, *, reduces: bool) -> Packed:
    """Encode a payload in a dtype that the backend sends. Returns the payload, and a function
    that decodes what arrives.

    Args:
        b: the builder of the local graph.
        x: the value to send, contiguous; flat unless it is all-reduced.
        reduces: whether the collective reduces.
    """
    dtype = x.meta["val"].dtype
    shape = list(x.meta["val"].shape)
    if dtype == torch.bool and not reduces:
        # Inductor promotes booleans by the number of ranks, to int64 (torch 2.13)
        return _cast(b, x, torch.uint8), lambda y: _cast(b, y, torch.bool)
    if dtype in CARRIED:
        return x, lambda y: y
    if dtype.is_complex:
        return _as_pairs(b, x, len(shape))
    if reduces:
        wide = torch.float32 if dtype.is_floating_point else torch.int64
        return b.call(aten._to_copy.default, x, dtype=wide), lambda y: b.call(
            aten._to_copy.default, y, dtype=dtype
        )
    parts = b.call(aten.view.dtype, b.call(aten.view.default, x, [*shape, 1]), torch.uint8)
    return parts, lambda y: b.call(
        aten.view.default, b.call(aten.view.dtype, _rows(b, y, dtype.itemsize), dtype), [-1]
    )


def _pairs(b: Builder, y: torch.fx.Node, dims: int) -> torch.fx.Node:
    """View a received payload as pairs of real numbers."""
    return y if y.meta["val"].dim() == dims + 1 else _rows(b, y, 2)


def _rows(b: Builder, y: torch.fx.Node, width: int) -> torch.fx.Node:
    """View a flat payload as rows of so many elements."""
    return (
        y
        if y.meta["val"].dim() == 2
        else b.call(aten.view.default, y, [y.meta["val"].numel() // width, width])
    )


def _cast(b: Builder, x: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
    """Emit a cast."""
    return b.call(aten._to_copy.default, x, dtype=dtype)


def _as_pairs(b: Builder, x: torch.fx.Node, ndim: int) -> Packed:
    """Encode a complex payload as pairs of real numbers."""
    if x.meta["val"].is_conj():
        x = b.call(aten.resolve_conj.default, x)
    pairs = b.call(aten.view_as_real.default, x)
    return pairs, lambda y: b.call(aten.view_as_complex.default, _pairs(b, y, ndim))
