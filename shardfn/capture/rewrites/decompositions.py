"""The composite ops that capture decomposes, and those that it keeps for speed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from ... import _compat
from ...random import torch_ops
from . import foreach, known_values, reductions
from .reductions import narrow, wide

aten = torch.ops.aten

# Undecomposed they run faster, and each has one sharding rule.
UNDECOMPOSED = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "native_layer_norm",
    "native_layer_norm_backward",
    "native_group_norm",
    "native_group_norm_backward",
    "gelu",
    "gelu_backward",
    "silu",
    "silu_backward",
    "sigmoid_backward",
    "tanh_backward",
    "threshold_backward",
    "leaky_relu",
    "leaky_relu_backward",
    "elu",
    "elu_backward",
    "softplus",
    "softplus_backward",
    "hardtanh",
    "hardtanh_backward",
    "hardsigmoid_backward",
    "embedding_dense_backward",
    "_softmax",
    "_softmax_backward_data",
    "t",
    "transpose",
    "_unsafe_view",
    "addcmul",
    "addcdiv",
    "lerp",
    "max_pool2d_with_indices_backward",
    "split",
    "split_with_sizes",
    "stack",
    "new_zeros",
    "new_ones",
    "new_full",
    "zeros",
    "ones",
    "zeros_like",
    "ones_like",
    "select_backward",
    "slice_backward",
)


def _mean(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _mean_dim(x, None, dtype=dtype)


def _mean_dim(
    x: torch.Tensor,
    dim: list[int] | None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    count = _count(x, dim)
    if not count:
        return NotImplemented
    x, result = wide(x, dtype)
    return narrow(aten.div.Scalar(aten.sum.dim_IntList(x, dim, keepdim), count), result)


def _var_mean(
    x: torch.Tensor,
    dim: list[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    if x.is_complex():
        return NotImplemented
    count, correction = _count(x, dim), 1 if correction is None else correction
    if count - correction <= 0:
        return NotImplemented
    x, result = wide(x)
    mean = aten.div.Scalar(aten.sum.dim_IntList(x, dim, True), count)
    apart = x - mean
    var = aten.div.Scalar(
        aten.sum.dim_IntList(aten.mul.Tensor(apart, apart), dim, keepdim), count - correction
    )
    mean = mean if keepdim else mean.reshape(var.shape)
    return narrow(var, result), narrow(mean, result)


def _var(
    x: torch.Tensor,
    dim: list[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> torch.Tensor:
    out = _var_mean(x, dim, correction=correction, keepdim=keepdim)
    if out is NotImplemented:
        return NotImplemented
    return out[0]


def _count(x: torch.Tensor, dim: list[int] | None) -> int:
    if not x.dim():
        return 1
    dims = range(x.dim()) if not dim else [d % x.dim() for d in dim]
    return math.prod(x.shape[d] for d in dims)


def _unless_empty(reduce: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A reduction of all elements; torch has its own error for none."""
    return lambda x: reduce(x) if x.numel() else NotImplemented


def _product_then_add(product: Any) -> Callable[..., torch.Tensor]:
    """addmm and similar ops as a product and an addition: a Partial product is reduced before the
    addition. Of integers, factors are rounded toward zero, as torch's kernels round them.
    """

    def decomposed(
        bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
    ) -> torch.Tensor:
        out = product(a, b)
        if not (out.is_floating_point() or out.is_complex()):
            alpha, beta = int(alpha), int(beta)
        out = out if alpha == 1 else aten.mul.Scalar(out, alpha)
        if not beta:
            return out
        return aten.add.Tensor(out, bias if beta == 1 else aten.mul.Scalar(bias, beta))

    return decomposed


def _sum_of_products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The sum over the batch of the products of two batches of matrices."""
    return aten.sum.dim_IntList(aten.bmm.default(a, b), [0], dtype=a.dtype)


def _linspace(start: Any, end: Any, steps: int, **options: Any) -> torch.Tensor:
    """torch.linspace of integers: steps in float64, from whichever end is nearer, rounded toward
    zero.
    """
    dtype = options.get("dtype") or torch.get_default_dtype()
    numbers = isinstance(start, int | float) and isinstance(end, int | float)
    if dtype.is_floating_point or dtype.is_complex or not numbers or steps < 2:
        return NotImplemented
    start, end = int(start), int(end)
    step = (end - start) / (steps - 1)
    places = torch.arange(steps, device=options.get("device"))
    from_start = start + step * places.to(torch.float64)
    from_end = end - step * (steps - 1 - places).to(torch.float64)
    return torch.where(places < steps // 2, from_start, from_end).to(dtype)


def _roll(x: torch.Tensor, shifts: list[int], dims: Any = ()) -> torch.Tensor:
    """torch.roll of unsigned integers, as signed ones of the same size: torch has no index_select
    of them.
    """
    signed = SIGNED.get(x.dtype)
    if signed is None:
        return NotImplemented
    rolled = aten.roll.default(aten.view.dtype(x, signed), shifts, dims)
    return aten.view.dtype(rolled, x.dtype)


def _scatter_reduce(
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    src: torch.Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> torch.Tensor:
    """torch.scatter_reduce as sums and extremes that sources of several ranks can have terms of."""
    is_exact = x.dtype in (torch.float32, torch.float64)
    is_extreme = reduce in EXTREMES
    is_op = reduce == "prod" or (include_self and is_extreme)
    if is_op or not is_exact or not all(t.dim() and t.numel() for t in (x, index, src)):
        return NotImplemented
    zeros = torch.zeros_like(x)
    total = aten.scatter_add.default(zeros, dim, index, src)
    if include_self and reduce == "sum":
        return x + total
    counts = aten.scatter_add.default(zeros, dim, index, torch.ones_like(src))
    if is_extreme:
        start = torch.full_like(x, EXTREMES[reduce])
        found = aten.scatter_reduce.two(start, dim, index, src, reduce)
        return torch.where(counts == 0, x, found)
    if include_self:
        return (x + total) / (counts + 1)
    total = total / counts.clamp(min=1) if reduce == "mean" else total
    return torch.where(counts == 0, x, total)


def _added_at_number(op: Any) -> Callable[..., torch.Tensor]:
    """index_add at an index of 0 dims, as that of an index of one element: the decomposition of
    torch 2.13 fails on it.
    """

    def decomposed(
        x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: Any = 1
    ) -> torch.Tensor:
        if index.dim() or not x.dim() or not source.dim():
            return NotImplemented
        return op(x, dim, index.reshape(1), source, alpha=alpha)

    return decomposed


def _conj(x: Any) -> torch.Tensor:
    """The conjugate of a number, as in the gradient of x / 2j: Inductor takes that of a tensor."""
    if isinstance(x, torch.Tensor):
        return NotImplemented
    return torch.full((), x.conjugate(), dtype=torch.complex128)


def _multi_margin_loss(
    x: torch.Tensor,
    target: torch.Tensor,
    p: Any = 1,
    margin: Any = 1,
    weight: Any = None,
    by: int = 1,
) -> torch.Tensor:
    """The losses of one sample, in the shape of its target, where torch's have another dim."""
    if x.dim() != 1 or by:
        return NotImplemented
    row, label = x.unsqueeze(0), target.reshape(1)
    return aten.multi_margin_loss.default(row, label, p, margin, weight, by).reshape(target.shape)


def _multilabel_margin_loss(
    x: torch.Tensor, target: torch.Tensor, reduction: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and which classes are labels. Torch's adds terms for what follows the first -1 of
    a target (until torch 2.15).
    """
    rows, labels = torch.atleast_2d(x), torch.atleast_2d(target)
    classes = rows.shape[1]
    is_label = (labels == -1).cumsum(1) == 0
    known = torch.where(is_label, labels, -1)
    is_target = (known.unsqueeze(-1) == torch.arange(classes, device=x.device)).any(1)
    scores = rows.gather(1, known.clamp_min(0)).unsqueeze(-1)
    counts = is_label.unsqueeze(-1) & ~is_target.unsqueeze(1)
    margins = torch.where(counts, (1 - scores + rows.unsqueeze(1)).clamp_min(0), 0)
    loss = margins.sum((1, 2)) / classes
    reduced = (loss.reshape(x.shape[:-1]), loss.mean(), loss.sum())[reduction]
    return reduced, is_target.to(x.dtype).reshape(target.shape)


MEAN = 1  # a reduction


def _soft_margin_loss(x: torch.Tensor, target: torch.Tensor, reduction: int = MEAN) -> torch.Tensor:
    """The loss as torch's kernel has it: inf where the exponential is, also of half precision."""
    loss = (-x * target).exp().log1p()
    return (loss, loss.mean(), loss.sum())[reduction]


def _soft_margin_loss_backward(
    g: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int
) -> torch.Tensor:
    """The gradient of soft_margin_loss as torch's kernel has it, where the exponential is inf."""
    z = (-target * x).exp()
    slope = -target * z * g / (1 + z)
    return slope / x.numel() if reduction == MEAN else slope


EXTREMES = {"amax": -math.inf, "amin": math.inf}
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
OWN: dict[Any, Callable[..., Any]] = {
    **reductions.TABLE,
    aten.mean.default: _mean,
    aten.mean.dim: _mean_dim,
    aten.var_mean.correction: _var_mean,
    aten.var.correction: _var,
    aten.max.default: _unless_empty(aten.amax.default),
    aten.min.default: _unless_empty(aten.amin.default),
    aten.scatter_reduce.two: _scatter_reduce,
    aten.multilabel_margin_loss_forward.default: _multilabel_margin_loss,
    aten.addmm.default: _product_then_add(aten.mm.default),
    aten.addbmm.default: _product_then_add(_sum_of_products),
    aten.addmv.default: _product_then_add(aten.mv.default),
    aten.baddbmm.default: _product_then_add(aten.bmm.default),
    **torch_ops.TABLE,
}

# before torch's, which they leave the rest to
FIRST = {
    aten._conj.default: _conj,
    aten.index_add.default: _added_at_number(aten.index_add.default),
    aten.index_add_.default: _added_at_number(aten.index_add_.default),
    aten.linspace.default: _linspace,
    aten.soft_margin_loss.default: _soft_margin_loss,
    aten.soft_margin_loss_backward.default: _soft_margin_loss_backward,
    aten.multi_margin_loss.default: _multi_margin_loss,
    aten.roll.default: _roll,
    **known_values.TABLE,
}


@functools.cache
def table(undecomposed: frozenset[Any] = frozenset()) -> dict[Any, Any]:
    """The decompositions that capture applies, except those of ops with user rules."""
    if undecomposed:
        return {op: fn for op, fn in table().items() if op not in undecomposed}
    packets = [getattr(aten, name) for name in UNDECOMPOSED]
    kept = {getattr(packet, name) for packet in packets for name in packet.overloads()}
    theirs = {op: fn for op, fn in _compat.core_decompositions().items() if op not in kept}
    own = OWN | {op: _compat.decomposed.before(fn, theirs.get(op)) for op, fn in FIRST.items()}
    return theirs | {**own, **foreach.table()}
