"""Sample calls of ATen ops, small and odd, by the op's name: what every sharding rule is proved
on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import batch_samples
import torch
from sample_values import G, Sample, b, call, f, i, positive


def distinct(n: int, *shape: int) -> torch.Tensor:
    """Indices along dim 0 without repeats."""
    rest = shape[1:]
    columns = [torch.randperm(n, generator=G)[: shape[0]] for _ in range(math.prod(rest))]
    return torch.stack(columns, 1).view(shape)


def _grouped(x: tuple[int, ...], w: tuple[int, ...], ends: list[int] | None) -> Sample:
    """A product for each group, of small integers, which its dtype adds exactly."""
    offsets = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    return call(i(3, *x).bfloat16(), i(3, *w).bfloat16(), offsets)


def _softmax(*shape: int, dim: int = -1) -> torch.Tensor:
    return f(*shape).softmax(dim)


def _layer_norm_backward(weight: bool, mask: list[bool], *shape: int) -> Sample:
    x, w = f(*shape), f(shape[-1]) if weight else None
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, [shape[-1]], w, w, 1e-5)
    return call(f(*shape), x, [shape[-1]], mean, rstd, w, w, mask)


def _group_norm_backward(weight: bool, n: int, c: int, space: int, group: int) -> Sample:
    x, w = f(n, c, space), f(c) if weight else None
    _, mean, rstd = torch.ops.aten.native_group_norm(x, w, w, n, c, space, group, 1e-5)
    return call(f(n, c, space), x, mean, rstd, w, n, c, space, group, [True, weight, weight])


def _conv(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: Any,
    pad: list[int],
    transposed: bool = False,
    groups: int = 1,
) -> Sample:
    ones, zeros = [1] * len(pad), [0] * len(pad)
    return call(x, w, bias, ones, pad, ones, transposed, zeros, groups)


def _conv_backward(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: int,
    pad: list[int],
    mask: list[bool],
    transposed: bool = False,
) -> Sample:
    ones, zeros = [1] * len(pad), [0] * len(pad)
    out = torch.ops.aten.convolution(x, w, None, ones, pad, ones, transposed, zeros, 1)
    return call(
        f(*out.shape), x, w, [bias] if bias else None, ones, pad, ones, transposed, zeros, 1, mask
    )


def _walk(
    w: torch.Tensor, stride: int, pad: int, dilation: int, groups: int, transposed: bool = False
) -> tuple[Any, ...]:
    """The settings of a convolution, the same along each dim of space."""
    space = w.dim() - 2
    return ([stride] * space, [pad] * space, [dilation] * space, transposed, [0] * space, groups)


def _walked(x: torch.Tensor, w: torch.Tensor, bias: Any, *walk: Any) -> Sample:
    return call(x, w, bias, *_walk(w, *walk))


def _walked_backward(
    x: torch.Tensor, w: torch.Tensor, bias: int, mask: list[bool], *walk: Any
) -> Sample:
    out = torch.ops.aten.convolution(x, w, None, *_walk(w, *walk))
    return call(f(*out.shape), x, w, [bias] if bias else None, *_walk(w, *walk), mask)


def _padded_backward(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: Any,
    before: list[int],
    after: list[int],
    groups: int,
    mask: list[bool],
) -> Sample:
    ones = [1] * len(before)
    settings = ones, before, after, ones, groups
    out = torch.ops.shardfn.padded_convolution(x, w, None, *settings)
    return call(f(*out.shape), x, w, bias, *settings, mask)


def _pool_backward(dims: int, *shape: int) -> Sample:
    x, two, one, zero = f(*shape), [2] * dims, [1] * dims, [0] * dims
    out, index = getattr(torch.ops.aten, f"max_pool{dims}d_with_indices")(x, two, two)
    return call(f(*out.shape), x, two, two, zero, one, False, index)


def _avg_pool_backward(dims: int, *shape: int) -> Sample:
    x, two = f(*shape), [2] * dims
    out = getattr(torch.ops.aten, f"avg_pool{dims}d")(x, two, two)
    return call(f(*out.shape), x, two, two, [0] * dims, False, True, None)


def hidden(mask: torch.Tensor) -> torch.Tensor:
    """A mask by which a query sees none of the first keys, and another sees no key."""
    mask[..., 3, :3] = -float("inf")
    mask[..., 4, :] = -float("inf")
    return mask


def _attention(
    *shape: int,
    causal: bool = False,
    mask: Any = None,
    few: int | None = None,
    keys: int | None = None,
) -> Sample:
    """A call with so few key heads and so many keys, by default as many as of queries."""
    batch, heads, rows, width = shape
    of_keys = (batch, few or heads, keys or rows, width)
    return call(f(*shape), f(*of_keys), f(*of_keys), 0.0, causal, attn_mask=mask)


def _attention_backward(*shape: int, **options: Any) -> Sample:
    args, kwargs = _attention(*shape, **options)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*args, **kwargs)
    q, k, v, dropout, causal = args
    return call(f(*shape), q, k, v, out, lse, dropout, causal, **kwargs)


REDUCTIONS = {
    "aten.sum.default": [
        lambda: call(f(5, 3)),
        lambda: call(f(3, 2, 5)),
        lambda: call(i(9, 7)),
        lambda: call(f()),
    ],
    "aten.sum.dim_IntList": [
        lambda: call(f(5, 3), [0]),
        lambda: call(f(5, 3, 7), [0, -1], True),
        lambda: call(f(3, 5), [-1], dtype=torch.float32),
        lambda: call(i(9, 5, 3), [1]),
        lambda: call(f(5, 3), None),
        lambda: call(f(2, 3, 5), [2, 0]),
    ],
    "aten.amax.default": [
        lambda: call(f(5, 3), [0]),
        lambda: call(f(3, 5, 2), [-1, 0], True),
        lambda: call(i(99, 3, 5)),
        lambda: call(f(7)),
    ],
    "aten.amin.default": [
        lambda: call(f(5, 3), [1]),
        lambda: call(f(3, 5, 2), [1], True),
        lambda: call(i(99, 3, 5)),
    ],
    "aten.prod.dim_int": [lambda: call(f(5, 3), 0), lambda: call(f(3, 5), -1, True)],
    "aten.any.dim": [lambda: call(b(5, 3), 0), lambda: call(b(3, 5), -1, True)],
    "aten.any.dims": [lambda: call(b(5, 3), [0]), lambda: call(b(3, 5, 2), [-1, 0], True)],
    "aten.all.dim": [lambda: call(b(5, 3), 0), lambda: call(b(3, 5), -1, True)],
    "aten.all.dims": [lambda: call(b(5, 3), [0]), lambda: call(b(3, 5, 2), [-1, 0], True)],
    "aten.max.dim": [lambda: call(f(5, 3), 0), lambda: call(f(3, 5), -1, True)],
    "aten.min.dim": [lambda: call(f(5, 3), 1), lambda: call(f(3, 5, 2), -2, True)],
    "aten.argmax.default": [
        lambda: call(f(5, 3), 0),
        lambda: call(f(3, 5)),
        lambda: call(f(3, 5), -1, True),
        lambda: call(f(3, 5), None, True),
    ],
    "aten.argmin.default": [
        lambda: call(f(5, 3), 1),
        lambda: call(f(3, 5)),
        lambda: call(f(3, 5), -1, True),
    ],
    "aten._softmax.default": [lambda: call(f(5, 3), -1, False), lambda: call(f(3, 5, 2), 1, False)],
    "aten._log_softmax.default": [
        lambda: call(f(5, 3), -1, False),
        lambda: call(f(3, 5, 2), 1, False),
    ],
    "aten._softmax_backward_data.default": [
        lambda: call(f(5, 3), _softmax(5, 3), -1, torch.float64),
        lambda: call(f(3, 5, 2), _softmax(3, 5, 2, dim=1), 1, torch.float64),
    ],
    "aten._log_softmax_backward_data.default": [
        lambda: call(f(5, 3), f(5, 3).log_softmax(-1), -1, torch.float64)
    ],
    "aten.cumsum.default": [
        lambda: call(f(5, 3), 0),
        lambda: call(f(3, 5, 2), -1),
        lambda: call(i(9, 7), 0),
    ],
    "aten.cumprod.default": [lambda: call(f(5, 3), 0), lambda: call(f(3, 5, 2), 1)],
    "aten.sort.default": [
        lambda: call(f(5, 3)),
        lambda: call(f(5, 3), 0, True),
        lambda: call(f(3, 5, 2), dim=1),
    ],
    "aten.topk.default": [
        lambda: call(f(5, 3), 2),
        lambda: call(f(5, 3), 2, 0),
        lambda: call(f(3, 5, 2), 2, dim=1),
    ],
    "aten.flip.default": [
        lambda: call(f(5, 3), [0]),
        lambda: call(f(3, 5, 2), [-1, 0]),
        lambda: call(f(3, 5), []),
    ],
}

VIEWS = {
    "aten.view.default": [
        lambda: call(f(6, 4), [24]),
        lambda: call(f(24), [6, 4]),
        lambda: call(f(6, 4), [4, 6]),
        lambda: call(f(5, 1, 3), [1, 15]),
        lambda: call(f(2, 3, 5), [6, 5]),
        lambda: call(f(6, 5), [3, 2, 5]),
        lambda: call(f(5, 3), [5, 1, 3, 1]),
        lambda: call(f(1, 1), [1]),
        lambda: call(f(2, 6, 3), [4, 9]),
        lambda: call(f(15, 2), [-1, 5, 2]),
    ],
    "aten._unsafe_view.default": [
        lambda: call(f(3, 5, 2), [15, 2]),
        lambda: call(f(15, 2), [3, 5, 2]),
    ],
    "aten.reshape.default": [lambda: call(f(3, 5, 2), [3, 10]), lambda: call(f(5, 4).t(), [4, 5])],
    "aten.unsqueeze.default": [
        lambda: call(f(5, 3), 0),
        lambda: call(f(5, 3), -1),
        lambda: call(f(), 0),
    ],
    "aten.squeeze.default": [lambda: call(f(5, 1, 3, 1)), lambda: call(f(1))],
    "aten.squeeze.dim": [lambda: call(f(5, 1, 3), 1), lambda: call(f(5, 3), 0)],
    "aten.squeeze.dims": [lambda: call(f(5, 1, 3, 1), [1, 3]), lambda: call(f(1, 5), [0, 1])],
    "aten.t.default": [lambda: call(f(5, 3)), lambda: call(f(3)), lambda: call(f())],
    "aten.permute.default": [lambda: call(f(5, 3, 2), [2, 0, 1]), lambda: call(f(5, 3), [-1, 0])],
    "aten.transpose.int": [
        lambda: call(f(5, 3, 2), 0, -1),
        lambda: call(f(5, 3), 1, 1),
        lambda: call(f(), 0, 0),
    ],
    "aten.expand.default": [
        lambda: call(f(5, 1), [5, 3]),
        lambda: call(f(1, 3), [2, 5, 3]),
        lambda: call(f(5, 3), [-1, 3]),
        lambda: call(f(), [3]),
    ],
    "aten.slice.Tensor": [
        lambda: call(f(5, 3), 0, 1, 4),
        lambda: call(f(5, 3), 1, -2),
        lambda: call(f(5, 3), 0, 0, 9223372036854775807),
        lambda: call(f(5, 3), 0, -5, 5),
        lambda: call(f(7, 3), 0, 0, 7, 2),
        lambda: call(f(5, 1), 1, 0, 1, 3),
        lambda: call(f(5, 3)),
    ],
    "aten.slice_backward.default": [
        lambda: call(f(3, 3), [5, 3], 0, 1, 4, 1),
        lambda: call(f(5, 2), [5, 4], 1, 0, 4, 2),
    ],
    "aten.split.Tensor": [
        lambda: call(f(5, 3), 2),
        lambda: call(f(3, 5), 2, 1),
        lambda: call(f(3, 5), 2, -1),
        lambda: call(f(9, 2), 3),
    ],
    "aten.split_with_sizes.default": [
        lambda: call(f(5, 3), [2, 3]),
        lambda: call(f(3, 14), [7, 7], -1),
        lambda: call(f(3, 5), [1, 4], 1),
    ],
    "aten.as_strided.default": [
        lambda: call(f(5, 3, 2), [5, 2], [6, 1], 4),
        lambda: call(f(5, 3, 2), [5, 2], [6, 1], 5),
        lambda: call(f(20), [5, 3], [4, 1], 1),
    ],
    "aten.as_strided_scatter.default": [
        lambda: call(f(5, 3, 2), f(5, 2), [5, 2], [6, 1], 2),
        lambda: call(f(20), f(5, 3), [5, 3], [4, 1], 1),
    ],
    "aten.cat.default": [
        lambda: call([f(5, 3), f(2, 3)]),
        lambda: call([f(5, 3), f(5, 1), f(5, 2)], -1),
        lambda: call([f(0), f(5, 3)], 0),
        lambda: call([f(5, 3)], 1),
        lambda: call([f(2, 4), f(2, 4), f(2, 4)], 1),
    ],
    "aten.stack.default": [
        lambda: call([f(5, 3), f(5, 3)]),
        lambda: call([f(5, 3), f(5, 3)], -1),
        lambda: call([f(5), f(5)], 1),
        lambda: call([f(), f()]),
    ],
    "aten.select.int": [lambda: call(f(5, 3), 0, 2), lambda: call(f(5, 3, 2), -2, -1)],
    "aten.select_backward.default": [
        lambda: call(f(3), [5, 3], 0, 2),
        lambda: call(f(5, 2), [5, 3, 2], -2, -1),
    ],
    "aten.constant_pad_nd.default": [
        lambda: call(f(5, 3), [1, 2]),
        lambda: call(f(5, 3), [0, 0, 2, 1], 7.0),
        lambda: call(f(5, 3), [1, 0, 0, 0]),
        lambda: call(f(5, 3), [0, 0, 1, -1]),
        lambda: call(f(7, 3), [1, 0, -2, 2]),
        lambda: call(f(2, 3), [0, 0, -1, 1], 0.5),
        lambda: call(f(5, 3), [-1, 1], 2.0),
    ],
}

PRODUCTS = {
    "aten.mm.default": [
        lambda: call(f(5, 3), f(3, 7)),
        lambda: call(f(3, 5).t(), f(3, 2)),
        lambda: call(f(1, 3), f(3, 1)),
        lambda: call(i(9, 3, 5), i(9, 5, 2)),
    ],
    "aten.bmm.default": [
        lambda: call(f(5, 2, 3), f(5, 3, 7)),
        lambda: call(f(2, 1, 5), f(2, 5, 3)),
    ],
    "aten.mv.default": [lambda: call(f(5, 3), f(3)), lambda: call(f(2, 7), f(7))],
    "aten.dot.default": [lambda: call(f(5), f(5)), lambda: call(f(2), f(2))],
    "aten._grouped_mm.default": [
        lambda: _grouped((5, 16), (2, 16, 24), [2, 5]),
        lambda: _grouped((2, 16, 24), (24, 16), [8, 16]),
        lambda: _grouped((16, 24), (24, 16), [8, 24]),
        lambda: _grouped((3, 16, 24), (3, 24, 16), None),
    ],
}

NORMS = {
    "aten.native_layer_norm.default": [
        lambda: call(f(5, 3), [3], f(3), f(3), 1e-5),
        lambda: call(f(3, 5, 2), [5, 2], None, None, 1e-5),
        lambda: call(f(2, 3, 5), [5], f(5), None, 1e-5),
    ],
    "aten.native_layer_norm_backward.default": [
        lambda: _layer_norm_backward(True, [True, True, True], 5, 3),
        lambda: _layer_norm_backward(False, [True, False, False], 2, 5, 3),
        lambda: _layer_norm_backward(True, [True, True, False], 3, 2, 5),
        lambda: _layer_norm_backward(True, [False, True, True], 5, 3),
    ],
    "aten.native_group_norm.default": [
        lambda: call(f(5, 6, 3), f(6), f(6), 5, 6, 3, 2, 1e-5),
        lambda: call(f(3, 4, 5), None, None, 3, 4, 5, 1, 1e-5),
    ],
    "aten.native_group_norm_backward.default": [
        lambda: _group_norm_backward(True, 5, 6, 3, 2),
        lambda: _group_norm_backward(False, 3, 4, 5, 1),
    ],
}

CONVOLUTIONS = {
    "aten.convolution.default": [
        lambda: _conv(f(5, 3, 4, 5), f(2, 3, 3, 3), f(2), [1, 1]),
        lambda: _conv(f(3, 2, 7), f(5, 2, 3), None, [0]),
        lambda: _conv(f(3, 4, 5), f(6, 2, 3), f(6), [1], groups=2),
        lambda: _conv(f(3, 2, 5), f(2, 3, 3), f(3), [1], transposed=True),
        lambda: _walked(f(2, 3, 6, 12), f(4, 3, 3, 3), f(4), 2, 1, 1, 1),
        lambda: _walked(f(2, 3, 14), f(5, 3, 3), f(5), 1, 2, 2, 1),
        lambda: _walked(f(2, 6, 15), f(9, 2, 5), f(9), 3, 1, 1, 3),
        lambda: _walked(f(2, 4, 6), f(4, 3, 3), f(6), 2, 1, 1, 2, True),
        lambda: _walked(f(2, 3, 8), f(2, 3, 2), None, 2, 0, 1, 1),
        lambda: _walked(f(2, 3, 6), f(2, 3, 1), f(2), 2, 0, 1, 1),
        lambda: _walked(f(1, 2, 3, 4, 5), f(3, 2, 3, 3, 3), None, 1, 1, 1, 1),
    ],
    "shardfn.padded_convolution.default": [
        lambda: call(f(2, 3, 14), f(5, 3, 4), f(5), [1], [3], [0], [1], 1),
        lambda: call(f(2, 6, 12), f(6, 1, 3), None, [1], [4], [0], [2], 6),
        lambda: call(f(2, 3, 8, 5), f(4, 3, 3, 3), f(4), [1, 1], [2, 1], [0, 1], [1, 1], 1),
    ],
    "shardfn.padded_convolution_backward.default": [
        lambda: _padded_backward(f(2, 3, 14), f(5, 3, 4), [5], [3], [0], 1, [True, True, True]),
        lambda: _padded_backward(f(2, 6, 12), f(6, 1, 3), None, [2], [0], 6, [True, True, False]),
        lambda: _padded_backward(f(2, 3, 14), f(5, 3, 4), [5], [2], [1], 1, [False, True, True]),
        lambda: _padded_backward(
            f(2, 3, 8, 5), f(4, 3, 3, 3), [4], [2, 1], [0, 1], 1, [True, True, True]
        ),
    ],
    "aten.convolution_backward.default": [
        lambda: _conv_backward(f(5, 3, 4, 5), f(2, 3, 3, 3), 2, [1, 1], [True, True, True]),
        lambda: _conv_backward(f(3, 2, 7), f(5, 2, 3), 0, [0], [True, True, False]),
        lambda: _conv_backward(f(3, 2, 7), f(5, 2, 3), 5, [0], [False, True, True]),
        lambda: _conv_backward(f(3, 2, 5), f(2, 3, 3), 3, [1], [True, True, True], transposed=True),
        lambda: _walked_backward(f(2, 3, 6, 12), f(4, 3, 3, 3), 4, [True, True, True], 2, 1, 1, 1),
        lambda: _walked_backward(f(2, 3, 14), f(5, 3, 3), 5, [True, False, True], 1, 2, 2, 1),
        lambda: _walked_backward(f(2, 6, 15), f(9, 2, 5), 9, [True, True, True], 3, 1, 1, 3),
        lambda: _walked_backward(f(2, 4, 6), f(4, 3, 3), 6, [True, True, True], 2, 1, 1, 2, True),
        lambda: _walked_backward(f(2, 3, 8), f(2, 3, 2), 0, [True, True, False], 2, 0, 1, 1),
        lambda: _walked_backward(f(2, 3, 6), f(2, 3, 1), 2, [False, False, True], 2, 0, 1, 1),
        lambda: _walked_backward(f(2, 3, 9), f(2, 3, 3), 2, [False, True, True], 1, 1, 1, 1),
        lambda: _walked_backward(
            f(1, 2, 3, 4, 5), f(3, 2, 3, 3, 3), 3, [True, True, True], 1, 1, 1, 1
        ),
    ],
    "aten.max_pool2d_with_indices.default": [
        lambda: call(f(5, 3, 4, 6), [2, 2], [2, 2]),
        lambda: call(f(3, 4, 6), [2, 2]),
    ],
    "aten.max_pool2d_with_indices_backward.default": [
        lambda: _pool_backward(2, 5, 3, 4, 6),
        lambda: _pool_backward(2, 3, 4, 6),
    ],
    "aten.avg_pool2d.default": [lambda: call(f(5, 3, 4, 6), [2, 2], [2, 2])],
    "aten.avg_pool2d_backward.default": [lambda: _avg_pool_backward(2, 5, 3, 4, 6)],
    "aten._adaptive_avg_pool2d.default": [
        lambda: call(f(5, 3, 5, 7), [2, 3]),
        lambda: call(f(2, 3, 6, 7), [3, 7]),
    ],
    "aten._adaptive_avg_pool2d_backward.default": [lambda: call(f(5, 3, 2, 3), f(5, 3, 5, 7))],
    "aten.max_pool3d_with_indices.default": [lambda: call(f(5, 3, 2, 4, 6), [2, 2, 2], [2, 2, 2])],
    "aten.max_pool3d_with_indices_backward.default": [lambda: _pool_backward(3, 5, 3, 2, 4, 6)],
    "aten.avg_pool3d.default": [lambda: call(f(5, 3, 2, 4, 6), [2, 2, 2], [2, 2, 2])],
    "aten.avg_pool3d_backward.default": [lambda: _avg_pool_backward(3, 5, 3, 2, 4, 6)],
    "aten._adaptive_avg_pool3d.default": [lambda: call(f(5, 3, 3, 5, 7), [2, 2, 3])],
    "aten._adaptive_avg_pool3d_backward.default": [
        lambda: call(f(5, 3, 2, 2, 3), f(5, 3, 3, 5, 7))
    ],
}

ATTENTION = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": [
        lambda: _attention(5, 3, 4, 2),
        lambda: _attention(3, 3, 5, 2, causal=True),
        lambda: _attention(3, 2, 5, 2, mask=f(3, 2, 5, 5)),
        lambda: _attention(3, 2, 5, 2, mask=f(5, 5)),
        lambda: _attention(1, 3, 5, 2, mask=f(1, 1, 5, 5)),
        lambda: _attention(3, 1, 5, 2, mask=f(3, 1, 5, 5)),
        lambda: _attention(2, 6, 3, 2, few=3),
        lambda: _attention(3, 4, 3, 2, few=2, mask=f(3, 4, 3, 3)),
        lambda: _attention(1, 6, 5, 2, few=1, causal=True),
        lambda: _attention(1, 6, 7, 2, few=2, causal=True, keys=9),
        lambda: _attention(1, 2, 7, 2, causal=True, keys=5),
        lambda: _attention(2, 2, 5, 2, keys=3),
        lambda: _attention(2, 2, 5, 2, keys=3, mask=f(2, 2, 1, 3)),
        lambda: _attention(2, 2, 5, 2, keys=3, mask=f(1, 2, 5, 1)),
        lambda: _attention(1, 4, 7, 2, keys=5, mask=hidden(f(1, 1, 7, 5))),
    ],
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": [
        lambda: _attention_backward(5, 3, 4, 2),
        lambda: _attention_backward(3, 3, 5, 2, causal=True),
        lambda: _attention_backward(2, 3, 5, 2, mask=f(2, 1, 5, 5)),
        lambda: _attention_backward(2, 6, 3, 2, few=3),
        lambda: _attention_backward(1, 6, 5, 2, few=1, causal=True),
        lambda: _attention_backward(1, 6, 7, 2, few=2, causal=True, keys=9),
        lambda: _attention_backward(1, 2, 7, 2, causal=True, keys=5),
        lambda: _attention_backward(2, 2, 5, 2, keys=3, mask=f(2, 2, 1, 3)),
        lambda: _attention_backward(1, 4, 7, 2, keys=5, mask=hidden(f(1, 1, 7, 5))),
    ],
}

STARTS = (0, 2, 2, 5)  # of bags, the second of which is empty


def _bag(mode: int, *, weights: torch.Tensor | None = None, padding: int = -1) -> Sample:
    starts = torch.tensor(STARTS)
    rest = (False, mode, False, weights, False, padding)
    return call(f(7, 3), i(7, 11), starts, *rest)


def _bag_backward(
    mode: int, *, weights: torch.Tensor | None = None, padding: int = -1, by_freq: bool = False
) -> Sample:
    args, _ = _bag(mode, weights=weights, padding=padding)
    _, *made = torch.ops.aten._embedding_bag.default(*args)
    rest = (7, by_freq, mode, False, weights, padding)
    return call(f(4, 3), *args[1:3], *made, *rest)


def _weights_backward(padding: int) -> Sample:
    args, _ = _bag(0, padding=padding)
    _, bags, *_ = torch.ops.aten._embedding_bag.default(*args)
    return call(f(4, 3), *args[:3], bags, 0, padding)


LOOKUPS = {
    "aten.embedding.default": [
        lambda: call(f(7, 3), i(7, 5)),
        lambda: call(f(3, 5), i(3, 2, 3)),
        lambda: call(f(5, 2), i(5)),
        lambda: call(f(5, 3), i(5, 3), 1),
    ],
    "aten.embedding_dense_backward.default": [
        lambda: call(f(5, 3), i(7, 5), 7, -1, False),
        lambda: call(f(2, 3, 5), i(3, 2, 3), 3, 1, False),
        lambda: call(f(5, 3), i(3, 5), 3, -1, True),
    ],
    "aten._embedding_bag.default": [
        lambda: _bag(0),
        lambda: _bag(0, weights=f(11)),
        lambda: _bag(0, padding=2),
        lambda: _bag(1, padding=2),
        lambda: _bag(2),
    ],
    "aten._embedding_bag_forward_only.default": [lambda: _bag(1)],
    "aten._embedding_bag_backward.default": [
        lambda: _bag_backward(0),
        lambda: _bag_backward(0, weights=f(11), padding=2),
        lambda: _bag_backward(1, padding=2),
        lambda: _bag_backward(2),
        lambda: _bag_backward(0, by_freq=True),
    ],
    "aten._embedding_bag_per_sample_weights_backward.default": [
        lambda: _weights_backward(-1),
        lambda: _weights_backward(2),
    ],
    "aten.gather.default": [
        lambda: call(f(5, 3), 0, i(5, 5, 3)),
        lambda: call(f(5, 3), -1, i(3, 5, 7)),
        lambda: call(f(5, 3), 1, i(3, 2, 3)),
        lambda: call(f(7), 0, i(7, 3)),
        lambda: call(i(9, 5, 3), 0, i(5, 2, 3)),
        lambda: call(b(5, 3), 0, i(5, 5, 3)),
        lambda: call(f(5), 0, i(5)),
    ],
    "aten.scatter.value": [
        lambda: call(f(5, 3), 0, distinct(5, 2, 3), 7.0),
        lambda: call(f(5, 3), 0, distinct(5, 5, 3), 7.0),
        lambda: call(f(7), 0, i(7, 3), -1.0),
    ],
    "aten.scatter.src": [
        lambda: call(f(5, 3), 0, distinct(5, 2, 3), f(2, 3)),
        lambda: call(f(3, 5), 1, distinct(5, 2, 3).t(), f(3, 2)),
        lambda: call(f(5, 3), 0, distinct(5, 2, 2), f(3, 3)),
    ],
    "aten.scatter_add.default": [
        lambda: call(f(5, 3), 0, i(5, 7, 3), f(7, 3)),
        lambda: call(f(5, 3), 1, i(3, 5, 2), f(5, 2)),
        lambda: call(f(5), 0, i(5, 2), f(2)),
        lambda: call(f(5, 3), 0, i(5, 2, 3), f(3, 3)),
    ],
    "aten.index.Tensor": [
        lambda: call(f(5, 3), [i(5, 7)]),
        lambda: call(f(5, 3, 2), [None, i(3, 5)]),
        lambda: call(f(5, 3), [i(5, 2, 1), i(3, 3)]),
        lambda: call(f(5, 3, 2), [i(5, 3), None, i(2, 3)]),
        lambda: call(f(5, 3), [i(5, 1)]),
        lambda: call(f(5, 3), [i(5)]),
        lambda: call(f(5, 3, 2), [None, i(3, 2, 1), i(2, 1, 1)]),
    ],
    "aten.index_put.default": [
        lambda: call(f(5, 3), [i(5, 7)], f(7, 3), True),
        lambda: call(f(5, 3), [distinct(5, 2)], f(2, 3)),
        lambda: call(f(5, 3, 2), [None, i(3, 5)], f(5, 5, 2), True),
        lambda: call(f(5, 3), [i(5, 2, 1), i(3, 3)], f(2, 3), True),
        lambda: call(f(5, 3), [i(5, 7)], f(3), True),
        lambda: call(f(5, 3), [i(5, 2)], f(2, 1), True),
        lambda: call(f(5, 3), [i(5, 1)], f(1, 3), True),
        lambda: call(f(5, 3), [i(5, 2, 1), i(3, 3)], f(2, 1), True),
    ],
    "aten.index_select.default": [
        lambda: call(f(5, 3), 0, i(5, 7)),
        lambda: call(f(5, 3, 2), -2, i(3, 2)),
        lambda: call(f(5, 3), 1, i(3, 1)),
        lambda: call(f(5, 3), 0, i(5)),
    ],
}

# Scalars, sizes of zero, and dtypes that are mixed or changed.
EDGES = {
    "aten.sum.default": [
        lambda: call(f(0, 3)),
        lambda: call(b(5, 3)),
        lambda: call(f(5, 3) * 9, dtype=torch.int64),
    ],
    "aten.sum.dim_IntList": [
        lambda: call(f(), [0]),
        lambda: call(f(0, 3), [0]),
        lambda: call(f(5, 3) * 9, [0], dtype=torch.int64),
    ],
    "aten.amax.default": [
        lambda: call(f(), [0]),
        lambda: call(b(5, 3), [0]),
        lambda: call(f(5, 0), [0]),
    ],
    "aten.amin.default": [lambda: call(b(5, 3), [0]), lambda: call(i(9, 5, 3).int(), [0])],
    "aten.any.dims": [lambda: call(b(), [0]), lambda: call(b(5, 3), [])],
    "aten.any.dim": [lambda: call(b(), 0), lambda: call(f(5, 3), 0)],
    "aten.prod.dim_int": [lambda: call(f(), 0)],
    "aten.max.dim": [lambda: call(f(), 0)],
    "aten.argmax.default": [lambda: call(f(), 0), lambda: call(f())],
    "aten.cumsum.default": [lambda: call(f(), 0), lambda: call(f(5, 3) * 9, 0, dtype=torch.int64)],
    "aten.sort.default": [lambda: call(f())],
    "aten.topk.default": [lambda: call(f(), 1)],
    "aten._softmax.default": [lambda: call(f(), 0, False), lambda: call(f(0, 3), 1, False)],
    "aten.view.default": [
        lambda: call(f(0, 3), [3, 0]),
        lambda: call(f(), [1, 1]),
        lambda: call(f(2, 2, 2, 2), [4, 4]),
    ],
    "aten.mm.default": [lambda: call(f(0, 3), f(3, 2)), lambda: call(f(3, 0), f(0, 2))],
    "aten.cat.default": [lambda: call([f(5, 3), i(9, 5, 3)], 0), lambda: call([f(0, 3), f(5, 3)])],
    "aten.expand.default": [lambda: call(f(1, 3), [0, 3])],
    "aten.slice.Tensor": [lambda: call(f(5, 3), 0, 3, 3), lambda: call(f(5, 3), -1, -100, 100)],
    "aten.split.Tensor": [lambda: call(f(5, 3), 100)],
    "aten.constant_pad_nd.default": [
        lambda: call(f(5, 3), []),
        lambda: call(b(5, 3), [1, 0], True),
    ],
    "aten.embedding.default": [lambda: call(i(9, 5, 3), i(5, 4)), lambda: call(f(5, 3), i(5, 0))],
    "aten.gather.default": [
        lambda: call(f(), 0, i(1, 3)),
        lambda: call(f(5, 3).to(torch.complex128), 0, i(5, 5, 3)),
    ],
    "aten.scatter.value": [
        lambda: call(b(5, 3), 0, distinct(5, 2, 3), True),
        lambda: call(f(5, 3), 0, i(5, 0, 3), 1.0),
    ],
    "aten.scatter.src": [lambda: call(f(), 0, i(1), f())],
    "aten.scatter_add.default": [
        lambda: call(f(5), 0, i(5), f()),
        lambda: call(i(9, 5, 3), 0, i(5, 7, 3), i(9, 7, 3)),
    ],
    "aten.index.Tensor": [
        lambda: call(f(5, 3), [i(5, 0)]),
        lambda: call(f(5, 3), [-1 - i(5, 4)]),
        lambda: call(f(5, 3, 4), [i(5, 2, 1), i(3, 3), None]),
        lambda: call(f(5, 3, 4), [None, i(3, 6), -1 - i(4, 2, 1)]),
        lambda: call(b(5, 3), [i(5, 7)]),
    ],
    "aten.index_put.default": [
        lambda: call(f(5, 3), [i(5, 0)], f(0, 3), True),
        lambda: call(f(5, 3), [b(5, 3)], f()),
        lambda: call(f(5, 3), [b(5)], f(3)),
        lambda: call(f(5, 3), [b(5)], f(1, 3), True),
        lambda: call(f(7, 3), [-1 - i(7, 5)], f(5, 3), True),
        lambda: call(f(5, 3, 4), [i(5, 6), None, i(4, 6)], f(6, 3), True),
        lambda: call(f(5, 3), [i(5, 4), i(3, 4)], f(), True),
    ],
    "aten.index_select.default": [lambda: call(f(), 0, i(1, 1)), lambda: call(b(5, 3), 0, i(5, 4))],
    "aten.native_layer_norm.default": [lambda: call(f(3), [3], None, None, 1e-5)],
}

RANDOM: dict[str, list[Callable[[], Sample]]] = {
    "shardfn.random_bits.default": [
        lambda: call(i(9, 2), None, [5, 3], [3, 1], 0, 0, torch.float64),
        lambda: call(i(9, 4, 2), None, [3], [1], 1, 0, torch.int64),
        lambda: call(i(9, 3), None, [2, 5], [5, 1], 3, 2, torch.float32),
        lambda: call(i(9, 2), i(9), [7], [1], 0, 0, torch.bool),
    ]
}
IN_TABLES: dict[str, list[Callable[[], Sample]]] = {
    **RANDOM,
    **REDUCTIONS,
    **VIEWS,
    **PRODUCTS,
    **NORMS,
    **CONVOLUTIONS,
    **ATTENTION,
    **LOOKUPS,
    **batch_samples.MATRICES,
    **batch_samples.IMAGES,
    **batch_samples.REST,
}
IN_TABLES = {name: [*found, *EDGES.get(name, ())] for name, found in IN_TABLES.items()}

_UNARY = (
    "abs acos angle asin asinh atan atanh ceil cos cosh deg2rad digamma erf erfc erfinv "
    "exp exp2 expm1 floor frac i0 isinf "
    "isnan lgamma nan_to_num neg positive reciprocal relu relu6 round sgn sigmoid sign "
    "signbit silu sin sinc sinh square tan "
    "tanh trunc mish selu celu elu gelu hardtanh hardsigmoid hardshrink softshrink "
    "softplus leaky_relu logical_not clone "
    "detach alias lift_fresh_copy isfinite special_entr special_erfcx special_i0e special_i1"
)
_POSITIVE = "log log10 log1p log2 rsqrt sqrt acosh special_log_ndtr logit"
_BINARY = (
    "atan2 hypot logaddexp logaddexp2 maximum minimum fmax fmin nextafter add.Tensor "
    "sub.Tensor mul.Tensor div.Tensor "
    "eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor fmod.Tensor "
    "remainder.Tensor copysign.Tensor heaviside "
    "logical_and logical_or logical_xor max.other min.other clamp_min.Tensor "
    "clamp_max.Tensor true_divide.Tensor copy"
)
_GRADIENTS = "tanh_backward sigmoid_backward silu_backward gelu_backward"
_INTEGERS = (
    "bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor gcd lcm add.Tensor sub.Tensor "
    "mul.Tensor div.Tensor bitwise_left_shift.Tensor"
)


def _name(text: str) -> str:
    return f"aten.{text}" if "." in text else f"aten.{text}.default"


def _pointwise() -> dict[str, list[Callable[[], Sample]]]:
    out: dict[str, list[Callable[[], Sample]]] = {}
    for op in _UNARY.split():
        out[_name(op)] = [lambda: call(f(5, 3)), lambda: call(f(1, 2, 3))]
    for op in _POSITIVE.split():
        out[_name(op)] = [lambda: call(positive(5, 3)), lambda: call(positive(7))]
    for op in _BINARY.split():
        out[_name(op)] = [
            lambda: call(f(5, 3), f(5, 3)),
            lambda: call(f(3, 5, 2), f(5, 1)),
            lambda: call(f(1, 3), f(1, 3)),
        ]
        if op != "copy":
            out[_name(op)] += [lambda: call(f(3), f(5, 1)), lambda: call(f(5, 3), f())]
    for op in _GRADIENTS.split():
        out[_name(op)] = [lambda: call(f(5, 3), f(5, 3)), lambda: call(f(2, 1, 3), f(2, 1, 3))]
    for op in _INTEGERS.split():
        out.setdefault(_name(op), []).append(lambda: call(i(9, 5, 3) + 1, i(9, 3) + 1))
    return out


POINTWISE: dict[str, list[Callable[[], Sample]]] = {
    **_pointwise(),
    "aten.acosh.default": [lambda: call(positive(5, 3) + 1)],
    "aten.logit.default": [lambda: call(positive(5, 3) / 2)],
    "aten.erfinv.default": [lambda: call(positive(5, 3) / 2)],
    "aten.add.Scalar": [lambda: call(f(5, 3), 2)],
    "aten.sub.Scalar": [lambda: call(f(5, 3), 2)],
    "aten.rsub.Scalar": [lambda: call(f(5, 3), 2)],
    "aten.mul.Scalar": [lambda: call(f(5, 3), 2.5), lambda: call(i(9, 5), 2.5)],
    "aten.div.Scalar": [lambda: call(f(5, 3), 2.5), lambda: call(i(9, 5), 2)],
    "aten.div.Tensor_mode": [lambda: call(f(5, 3), f(5, 1), rounding_mode="floor")],
    "aten.div.Scalar_mode": [lambda: call(f(5, 3), 0.3, rounding_mode="trunc")],
    "aten.add.Tensor": [
        lambda: call(f(5, 3), f(3), alpha=2),
        lambda: call(f(5, 3), 2),
        lambda: call(f(5, 3), f(5, 3)),
        lambda: call(f(5, 3), i(9, 3)),
        lambda: call(f(5, 1), f(1, 3)),
    ],
    "aten.sub.Tensor": [lambda: call(f(5, 3), f(3), alpha=2), lambda: call(f(1, 3), f(5, 1))],
    "aten.mul.Tensor": [
        lambda: call(f(5, 3), f(5, 1)),
        lambda: call(f(5, 3), 2.0),
        lambda: call(f(3), f(5, 3)),
        lambda: call(f(5, 3), b(5, 3)),
        lambda: call(i(9, 5), i(9, 5)),
    ],
    "aten.div.Tensor": [
        lambda: call(f(5, 3), f(5, 1)),
        lambda: call(i(9, 5), i(9, 5) + 1),
        lambda: call(f(5, 3), 2.0),
    ],
    "aten.pow.Tensor_Tensor": [lambda: call(positive(5, 3), f(3))],
    "aten.pow.Tensor_Scalar": [lambda: call(f(5, 3), 3)],
    "aten.pow.Scalar": [lambda: call(2.0, f(5, 3))],
    "aten.eq.Scalar": [lambda: call(i(3, 5, 3), 1)],
    "aten.ge.Scalar": [lambda: call(f(5, 3), 0.0)],
    "aten.clamp.default": [lambda: call(f(5, 3), -0.5, 0.5)],
    "aten.clamp.Tensor": [
        lambda: call(f(5, 3), f(3) - 2, f(5, 1) + 2),
        lambda: call(f(5, 3), None, f(3)),
    ],
    "aten.clamp_min.default": [lambda: call(f(5, 3), 0.1)],
    "aten.where.self": [
        lambda: call(b(5, 3), f(5, 3), f(5, 3)),
        lambda: call(b(5, 1), f(3), f()),
        lambda: call(b(3), f(5, 3), f(5, 1)),
        lambda: call(b(2, 5, 1), f(5, 3), f(2, 1, 1)),
    ],
    "aten.masked_fill.Scalar": [
        lambda: call(f(5, 3), b(3), -1.0),
        lambda: call(f(3), b(5, 3), 0.0),
    ],
    "aten.masked_fill.Tensor": [lambda: call(f(5, 3), b(5, 1), f())],
    "aten.addcmul.default": [lambda: call(f(5, 3), f(3), f(5, 1), value=0.5)],
    "aten.addcdiv.default": [lambda: call(f(5, 3), f(3), positive(5, 1), value=0.5)],
    "aten.lerp.Scalar": [lambda: call(f(5, 3), f(3), 0.3)],
    "aten.lerp.Tensor": [lambda: call(f(5, 3), f(3), f(5, 1))],
    "aten.threshold_backward.default": [lambda: call(f(5, 3), f(5, 3), 0)],
    "aten.leaky_relu_backward.default": [lambda: call(f(5, 3), f(5, 3), 0.1, False)],
    "aten.hardtanh_backward.default": [lambda: call(f(5, 3), f(5, 3), -1, 1)],
    "aten.softplus_backward.default": [lambda: call(f(5, 3), f(5, 3), 1, 20)],
    "aten.elu_backward.default": [lambda: call(f(5, 3), 1.0, 1.0, 1.0, False, f(5, 3))],
    "aten.gelu.default": [lambda: call(f(5, 3), approximate="tanh")],
    "aten.threshold.default": [lambda: call(f(5, 3), 0.1, 7.0)],
    "aten.xlogy.Tensor": [lambda: call(f(5, 3), positive(3))],
    "aten.polygamma.default": [lambda: call(1, positive(5, 3))],
    "aten._to_copy.default": [
        lambda: call(f(5, 3), dtype=torch.float32),
        lambda: call(f(5, 3).float(), dtype=torch.float64),
        lambda: call(f(5, 3), dtype=torch.int64),
        lambda: call(i(9, 5), dtype=torch.float64),
        lambda: call(f(5, 3), dtype=torch.complex128),
    ],
    "aten.clone.default": [
        lambda: call(f(5, 3)),
        lambda: call(f(3, 5).t(), memory_format=torch.contiguous_format),
    ],
}


def resolve(name: str) -> Any:
    """The op of a name such as `aten.add.Tensor`."""
    space, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload)


def make(name: str, position: int) -> Sample:
    """One sample of an op: the same numbers at every call."""
    G.manual_seed(position)
    return {**IN_TABLES, **POINTWISE}[name][position]()
