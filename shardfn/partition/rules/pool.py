"""Pooling: sharded over batch and channels, and over space if windows are adjacent and none
crosses a chunk's edge.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch

from .. import layout
from ..emission.graph_builder import Builder, LocalShard
from ..rule_api.op_record import Op
from ..rule_api.strategy import Choice, OpCall, replicated

aten = torch.ops.aten


@attrs.frozen
class Pool:
    """One op of the pooling family."""

    space: int  # dims
    backward: bool = False


POOLS: dict[object, Pool] = {
    aten.max_pool2d_with_indices.default: Pool(2),
    aten.max_pool3d_with_indices.default: Pool(3),
    aten.max_pool2d_with_indices_backward.default: Pool(2, backward=True),
    aten.max_pool3d_with_indices_backward.default: Pool(3, backward=True),
    aten.avg_pool2d.default: Pool(2),
    aten.avg_pool3d.default: Pool(3),
    aten.avg_pool2d_backward.default: Pool(2, backward=True),
    aten.avg_pool3d_backward.default: Pool(3, backward=True),
}
ADAPTIVE: dict[object, Pool] = {
    aten._adaptive_avg_pool2d.default: Pool(2),
    aten._adaptive_avg_pool3d.default: Pool(3),
    aten._adaptive_avg_pool2d_backward.default: Pool(2, backward=True),
    aten._adaptive_avg_pool3d_backward.default: Pool(3, backward=True),
}
MAX = {target: kind for target, kind in POOLS.items() if "max_pool" in str(target)}


def pool(call: OpCall) -> list[Choice]:
    """Shard pooling over batch and channels, and over space if windows do not overlap."""
    kind = POOLS.get(call.target) or ADAPTIVE[call.target]
    x, y = (call.ins[1], call.ins[0]) if kind.backward else (call.ins[0], call.outs[0])
    first = x.dim() - kind.space
    sizes = _adaptive_windows(x, y, first) if call.target in ADAPTIVE else _windows(call, kind)
    choices = [replicated(call)]
    for d in range(x.dim()):
        size = 1 if d < first else sizes[d - first]
        if d >= first and (not size or x.shape[d] != size * y.shape[d]):
            continue
        placement = layout.joined(d, size)
        large = (placement,), (d,) * len(call.outs)
        small = (d, placement, *[d] * (len(call.ins) - 2)), (placement,)
        choices.append(small if kind.backward else large)
    return choices


def _windows(call: OpCall, kind: Pool) -> list[int]:
    """Return the window size along each spatial dim; 0 where windows overlap, leave gaps or are
    padded.
    """
    at = 2 if kind.backward else 1
    each = lambda values: [*values] * (kind.space if len(values) == 1 else 1)
    kernel = each(call.arg(at, "kernel_size"))
    stride = each(call.arg(at + 1, "stride") or kernel)
    padding = each(call.arg(at + 2, "padding", [0]))
    dilation = each(call.arg(at + 3, "dilation", [1]) if call.target in MAX else [1])
    return [
        k if (k, 0) == (s, p) and 1 in (d, k) else 0
        for k, s, p, d in zip(kernel, stride, padding, dilation, strict=True)
    ]


def _adaptive_windows(x: torch.Tensor, y: torch.Tensor, first: int) -> list[int]:
    """Return the window sizes of adaptive pooling; 0 for an empty result."""
    return [n // m if m else 0 for n, m in zip(x.shape[first:], y.shape[first:], strict=True)]


def _moved(b: Builder, index: Any, x: LocalShard, space: int, to_global: bool) -> Any:
    """Convert flat indices into a rank's local image to indices into the global image, or back."""
    dims = range(len(x.shape) - space, len(x.shape))
    if not any(x.is_sharded(d) for d in dims):
        return index
    a, z = (x.local_shape, x.shape) if to_global else (x.shape, x.local_shape)
    total = None
    stride = 1
    for d in reversed(dims):
        at = b.call(aten.remainder.Scalar, index, a[d])
        index = b.call(aten.div.Tensor_mode, index, a[d], rounding_mode="floor")
        if x.is_sharded(d):
            at = b.call(aten.add.Tensor if to_global else aten.sub.Tensor, at, b.offset(x, d))
        at = b.call(aten.mul.Tensor, at, stride)
        total = at if total is None else b.call(aten.add.Tensor, total, at)
        stride *= z[d]
    return total


def lower_max(
    b: Builder, args: list[Any], kwargs: dict[str, Any], shards: list[LocalShard], target: Any
) -> Any:
    """Max-pool a rank's image, with indices into the global image."""
    out = b.call(target, *args, **kwargs)
    return [b.item(out, 0), _moved(b, b.item(out, 1), shards[0], MAX[target].space, True)]


def lower_max_backward(
    b: Builder, args: list[Any], kwargs: dict[str, Any], shards: list[LocalShard], target: Any
) -> Any:
    """Run max pooling's backward, with indices into the local image."""
    args[-1] = _moved(b, args[-1], shards[1], MAX[target].space, False)
    return b.call(target, *args, **kwargs)


def lower_adaptive(
    b: Builder, args: list[Any], kwargs: dict[str, Any], shards: list[LocalShard], target: Any
) -> Any:
    """Run adaptive pooling with the local size of the result."""
    (x,), space = shards, ADAPTIVE[target].space
    sizes = zip(args[1], x.local_shape[-space:], x.shape[-space:], strict=True)
    return b.call(
        target, args[0], [n * mine // whole if mine != whole else n for n, mine, whole in sizes]
    )


def _lowering(op: object) -> Callable[..., Any] | None:
    """Return how a rank computes a pooling op; None if it runs the op itself."""
    if op in MAX:
        return functools.partial(lower_max_backward if MAX[op].backward else lower_max, target=op)
    if op in ADAPTIVE and not ADAPTIVE[op].backward:
        return functools.partial(lower_adaptive, target=op)
    return None


TABLE: dict[object, Op] = {
    op: Op(pool, lower=_lowering(op), of_sizes=True) for op in (*POOLS, *ADAPTIVE)
}
