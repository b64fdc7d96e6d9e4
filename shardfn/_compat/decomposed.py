"""Ops that Inductor compiles to other values than torch's, decomposed into ops that it does not.

Each of these is wrong under `torch.compile` as well (torch 2.11 to 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .memory import may_overlap

aten = torch.ops.aten
NARROW = (torch.int8, torch.int16)
WRITERS = (
    aten._unsafe_index_put.default,
    aten.diagonal_scatter.default,
    aten.index_put.default,
    aten.select_scatter.default,
    aten.slice_scatter.default,
)
# Ops without a decomposition: some calls run by torch's kernels (by_kernels.py).
WHOLE = {
    aten.upsample_nearest1d.default,
    aten.upsample_nearest2d.default,
    aten.upsample_nearest3d.default,
}


def table() -> dict[Any, Any]:
    """Return Inductor's decomposition table, with ours in place of the decompositions that change
    values.
    """
    from torch._inductor import inductor_prims
    from torch._inductor.decomposition import select_decomp_table

    theirs = {op: fn for op, fn in select_decomp_table().items() if op not in WHOLE}
    of_pools: Any = inductor_prims._low_memory_max_pool_offsets_to_indices
    of_products: Any = inductor_prims.fma
    known = {**theirs, of_pools: _max_pool_indices, of_products: _fma}
    return {**known, **{op: before(ours, theirs.get(op)) for op, ours in OURS.items()}}


def before(ours: Callable[..., Any], theirs: Callable[..., Any] | None) -> Callable[..., Any]:
    """Chain two decompositions of an op: ours, and torch's where ours returns NotImplemented."""

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        result = ours(*args, **kwargs)
        if result is NotImplemented and theirs is not None:
            return theirs(*args, **kwargs)
        return result

    return decomposed


def _max_pool_indices(
    offsets: torch.Tensor,
    kernel: Sequence[int],
    sizes: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> torch.Tensor:
    """Decompose the places of the maxima in the input of a pool. Where all of a window is the
    smallest value of its dtype, Inductor takes a place in the padding; torch takes the first one
    of the input.

    Args:
        offsets: the place of each maximum in its window.
        kernel: the sizes of a window.
        sizes: the sizes of the dims that are pooled.
        stride: from one window to the next.
        padding: the elements before the input, in each dim.
        dilation: from one element of a window to the next.
    """
    count = len(kernel)
    rest, places = offsets.to(torch.int64), torch.zeros_like(offsets, dtype=torch.int64)
    steps = []
    for size in reversed(kernel):
        steps.insert(0, rest % size)
        rest = rest // size
    for d, step in enumerate(steps):
        shape = [1] * offsets.dim()
        shape[d - count] = -1
        window = torch.arange(offsets.shape[d - count], device=offsets.device).reshape(shape)
        start = window * stride[d] - padding[d]
        first = (-start + dilation[d] - 1) // dilation[d]
        places = places * sizes[d] + start + torch.maximum(step, first) * dilation[d]
    return places


def _cumsum(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """Decompose cumsum in a dtype into a cast, cumsum and a cast. Inductor drops the dtype where
    all values are one number.
    """
    if dtype is None and x.dtype != torch.bool:
        return NotImplemented
    dtype = dtype or torch.int64
    return aten.cumsum.default(x.to(dtype), dim).to(dtype)


def _add(a: Any, b: Any, *, alpha: Any = 1) -> Any:
    """Decompose a + alpha * b into a product and a sum. Inductor drops alpha where it fuses the sum
    with a matrix product.
    """
    is_one = isinstance(alpha, int | float) and alpha == 1
    tensors = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    if is_one or not tensors or torch.result_type(a, b) != b.dtype:
        return NotImplemented
    if b.dtype is torch.bool:  # Inductor writes integers of 64 bits into the memory of bools
        return torch.logical_or(a, b if alpha else torch.zeros_like(b))
    return aten.add.Tensor(a, aten.mul.Tensor(b, alpha))


def _mul(a: torch.Tensor, b: Any) -> Any:
    """Decompose x * 0 into x * 0.0 for floats, which keeps nan. Inductor folds a product with
    integer 0 to zeros, also where x is infinite or nan.
    """
    is_zero = isinstance(b, int) and b == 0
    if not is_zero or not (a.is_floating_point() or a.is_complex()):
        return NotImplemented
    return aten.mul.Tensor(a, 0.0)


def _fma(a: torch.Tensor, b: Any, c: Any) -> Any:
    """Decompose a * b + c of integers: Inductor computes it in floats."""
    return NotImplemented if a.is_floating_point() else torch.add(torch.mul(a, b), c)


def _abs(x: torch.Tensor) -> Any:
    """Decompose the absolute value of 8-bit and 16-bit integers: Inductor does not wrap that of the
    smallest one, and computes that of uint8 in 32 bits.
    """
    if x.dtype is torch.uint8:
        return aten.clone.default(x)
    if x.dtype not in NARROW:
        return NotImplemented
    return torch.where(x < 0, torch.neg(x), x)


def _sign(x: torch.Tensor) -> Any:
    """Decompose the sign of 8-bit and 16-bit integers: the code of Inductor is of 32 bits, and does
    not compile in a maximum.
    """
    if x.dtype not in NARROW:
        return NotImplemented
    return torch.sub((x > 0).to(x.dtype), (x < 0).to(x.dtype))


def _divide(a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    """Decompose a floor division of floats: 1.0 // 0.1 is 9, since 0.1 is a little more than a
    tenth. Inductor floors the quotient, which is 10. And a truncated division of 8-bit and 16-bit
    integers, for which the code of Inductor is of 32 bits.
    """
    dtype = torch.result_type(a, b)
    if rounding_mode == "trunc" and dtype in NARROW:
        wide = [x.to(torch.int32) if isinstance(x, torch.Tensor) else x for x in (a, b)]
        return torch.div(*wide, rounding_mode="trunc").to(dtype)
    if rounding_mode != "floor" or not _is_floating(a, b):
        return NotImplemented
    return _floor_divide(a, b)


def _floor_divide(a: Any, b: Any) -> Any:
    """Compute the floor division of floats from fmod, as torch's kernel does."""
    if not _is_floating(a, b):
        return NotImplemented
    a, b = _operands(a, b, is_rounded=False)
    rest = torch.fmod(a, b)
    is_below = _differ(rest, b)
    whole = (a - rest) / b
    whole = torch.where(is_below, whole - 1, whole)
    floor = torch.floor(whole)
    floor = torch.where(whole - floor > 0.5, floor + 1, floor)
    quotient = a / b
    floor = torch.where(whole != 0, floor, torch.copysign(torch.zeros_like(whole), quotient))
    # the rest of numbers that lie too far apart is no number
    is_far = rest.isnan() & torch.isfinite(a) & torch.isfinite(b)
    return torch.where((b == 0) | is_far, quotient, floor)


def _remainder(a: Any, b: Any) -> Any:
    """Compute the remainder of a floor division from fmod, the remainder toward zero, which is
    exact.
    """
    if not _is_floating(a, b):
        return NotImplemented
    a, b = _operands(a, b)
    rest = torch.fmod(a, b)
    return torch.where(_differ(rest, b), rest + b, rest)


def _differ(rest: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a mask of where a nonzero remainder has another sign than the divisor."""
    return (rest != 0) & ((rest < 0) != (b < 0))


def _is_floating(a: Any, b: Any) -> bool:
    """Check whether two operands promote to a floating dtype."""
    return torch.result_type(a, b).is_floating_point


def _rest(a: torch.Tensor, b: Any) -> Any:
    """Decompose fmod by a number: torch rounds the number to the tensor's dtype first."""
    if not _is_floating(a, b):
        return NotImplemented
    return torch.fmod(*_operands(a, b))


def _operands(a: Any, b: Any, *, is_rounded: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast both operands to tensors of their common dtype. Inductor computes with a 16-bit number
    unrounded, unless it is rounded here.
    """
    dtype = torch.result_type(a, b)
    first = next(x for x in (a, b) if isinstance(x, torch.Tensor))

    def operand(x: Any) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            return x.to(dtype)
        with _disable_current_modes():
            number = torch.tensor(x, dtype=dtype).item() if is_rounded else x
        return torch.full((), number, dtype=dtype, device=first.device)

    return operand(a), operand(b)


def _place(op: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Decompose the place of the largest or smallest of all elements to that in a tensor of one
    dim: Inductor counts them in the order in which they lie in memory.
    """

    def decomposed(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is not None or x.dim() < 2:
            return NotImplemented
        place = op(x.reshape(-1), 0)
        return place.reshape([1] * x.dim()) if keepdim else place

    return decomposed


def _written(op: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Decompose an op that writes into a copy of its first argument to one of a tensor in which
    each element has its own memory. Inductor writes into the argument itself, such as an expanded
    tensor or overlapping windows.
    """

    def decomposed(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if 0 not in x.stride() and not may_overlap(x):
            return NotImplemented
        return op(x.clone(memory_format=torch.contiguous_format), *args, **kwargs)

    return decomposed


def _matrices(a: torch.Tensor, b: torch.Tensor) -> Any:
    """Decompose products of integers of one row or one column to sums of their dtype: those of
    Inductor have int64.
    """
    is_integer = not (a.is_floating_point() or a.is_complex())
    if not is_integer or (a.shape[1] > 1 and b.shape[2] > 1):
        return NotImplemented
    return (a.unsqueeze(-1) * b.unsqueeze(1)).sum(2, dtype=a.dtype)


OURS = {
    aten.abs.default: _abs,
    aten.add.Tensor: _add,
    aten.argmax.default: _place(aten.argmax.default),
    aten.argmin.default: _place(aten.argmin.default),
    aten.bmm.default: _matrices,
    aten.cumsum.default: _cumsum,
    aten.div.Scalar_mode: _divide,
    aten.div.Tensor_mode: _divide,
    aten.floor_divide.Scalar: _floor_divide,
    aten.floor_divide.default: _floor_divide,
    aten.fmod.Scalar: _rest,
    aten.mul.Scalar: _mul,
    aten.mul.Tensor: _mul,
    aten.remainder.Scalar: _remainder,
    aten.remainder.Scalar_Tensor: _remainder,
    aten.remainder.Tensor: _remainder,
    aten.sgn.default: _sign,
    aten.sign.default: _sign,
    **{op: _written(op) for op in WRITERS},
}
