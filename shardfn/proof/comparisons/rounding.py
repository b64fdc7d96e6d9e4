"""Whether two results of one op on the same inputs differ by more than rounding.

The bound of an element is the smallest number of its dtype, and a sum of five terms:
    4 eps |y|                       the result's own rounding, with eps of its dtype; 1 or 2 where a
                                    wider accumulator is rounded once
    4 eps' (1 + log2 L) rms(y)      sums of L terms in another order, with eps' of the accumulator
    n eps sum of |terms|            n additions of the terms of a Partial value
    4 eps sqrt(m) rms(y)            m ops before it whose results are not known, as those in a loop
    2 (1 + log2 L eps'/eps) r       r is what the op itself makes of inputs that are rounded anew
The last one runs the op again, and only where the others do not suffice.

A pointwise op in a dtype with a wider accumulator rounds its inputs anew by the accumulator's eps.

Source: the standard model of floating-point arithmetic; Higham, Accuracy and Stability of Numerical
Algorithms, section 4.2 for sums in any order; r is a sampled condition number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import torch

OWN, ONCE, ORDER, AGAIN = 4.0, 1.01, 4.0, 2.0
MOVED = 4.0  # eps by which an input is moved at most
SAMPLES = 5  # of inputs that are rounded anew


@attrs.frozen(eq=False)
class Terms:
    """The terms of a Partial value, or of a sum that is added in another order.

    Args:
        magnitude: the sum of their magnitudes; None for a value that is not Partial.
        count: the number of additions that round.
    """

    magnitude: torch.Tensor | None = None
    count: int = 1

    def with_more(self, other: Terms) -> Terms:
        """The terms of both, where each of these is made of such."""
        if other.magnitude is None:
            return self
        if self.magnitude is None:
            return other
        count = self.count + other.count
        return Terms(torch.maximum(self.magnitude, other.magnitude), count)


ALONE = Terms()
# of a seed: the op's result on inputs that are rounded anew; on the inputs as they are without one
Again = Callable[[int | None], Any]


def exceeding(
    wanted: torch.Tensor,
    got: torch.Tensor,
    *,
    length: int = 1,
    terms: Terms = ALONE,
    unseen: int = 0,
    coarse: torch.dtype | None = None,
    again: Again | None = None,
) -> torch.Tensor | None:
    """Find the elements of two results of an op that differ by more than rounding.

    Args:
        wanted: the result of the op.
        got: the other result, of the same shape.
        length: the number of terms in the sums of the op.
        terms: of the other result, where it is Partial.
        unseen: the number of ops before it whose results are not known, as those in a loop.
        coarse: the dtype in which one of them was computed, if not that of the results.
        again: runs the op on inputs that are rounded anew.

    Returns:
        A mask of the elements; None if there are none.
    """
    if wanted.dtype == got.dtype and torch.equal(wanted, got):
        return None
    if not _is_inexact(wanted.dtype):
        mask = wanted != got
        return mask if bool(mask.any()) else None
    eps, accumulated = epsilons(wanted.dtype, coarse)
    if _is_close(wanted, got, accumulated, length):
        return None
    y, z = _wide(wanted), _wide(got)
    error = (z - y).abs()
    size = y.abs()
    finite = torch.isfinite(size) & torch.isfinite(z.abs())
    same = _same_special(y, z)
    scale = _rms(size, finite)
    depth = _depth(length)
    own = OWN if accumulated == eps else ONCE if length == 1 else 2 * ONCE
    smallest = torch.finfo(wanted.dtype if coarse is None else coarse).smallest_normal * eps
    bound = own * eps * size + smallest + ORDER * accumulated * depth * scale
    if unseen:
        bound = bound + ORDER * eps * math.sqrt(unseen) * scale
    if terms.magnitude is not None:
        bound = bound + OWN * terms.count * eps * terms.magnitude
    elif terms.count > 1:
        bound = bound + terms.count * eps * size
    mask = torch.where(finite, error > bound, ~same)
    if not bool(mask.any()):
        return None
    if again is None or not bool((mask & finite).any()):
        return mask
    response = _response(again)
    if response is not None:
        if length == 1:
            response = response * (accumulated / eps)
        wider = AGAIN * (1.0 + depth * accumulated / eps) * response
        mask = mask & ~(finite & (error <= bound + wider))
    return mask if bool(mask.any()) else None


def _depth(length: int) -> float:
    return 1.0 + math.log2(max(length, 1))


def _is_close(wanted: torch.Tensor, got: torch.Tensor, accumulated: float, length: int) -> bool:
    """Whether the second term of the bound suffices for every element, as it mostly does."""
    if not wanted.numel():
        return True
    if wanted.dtype.itemsize < 4:
        wanted, got = wanted.float(), got.float()
    largest = float((got - wanted).abs_().max())
    scale = float(torch.linalg.vector_norm(wanted)) / math.sqrt(wanted.numel())
    return largest <= 0.9 * ORDER * accumulated * _depth(length) * scale


def epsilons(dtype: torch.dtype, coarse: torch.dtype | None = None) -> tuple[float, float]:
    """Return the rounding of a result, and that of the sums inside of an op."""
    eps = torch.finfo(dtype).eps
    if coarse is not None:
        eps = max(eps, torch.finfo(coarse).eps)
    return eps, min(eps, torch.finfo(torch.float32).eps)


def length_of_sums(target: Any, ins: list[torch.Tensor], out: torch.Tensor) -> int:
    """Estimate the number of terms in the sums of an op, from shapes: 1 for a pointwise op.

    A contraction of M x K and K x N elements to M x N has sqrt(MK KN / MN) = K terms, a reduction
    of n elements to m has n / m, and a normalization sums along a dim.
    """
    if torch.Tag.pointwise in getattr(target, "tags", ()):
        return 1
    floats = [x.numel() for x in ins if _is_inexact(x.dtype) and x.numel()]
    if not floats or not out.numel():
        return 1
    length = max(n / out.numel() for n in floats)
    if len(floats) > 1:
        one, two, *_ = sorted(floats, reverse=True)
        length = max(length, math.sqrt(one * two / out.numel()))
    dims = [max(x.shape, default=1) for x in ins]
    return max(1, math.ceil(length), *dims)


def rounded_anew(x: torch.Tensor, seed: int, coarse: torch.dtype | None = None) -> torch.Tensor:
    """Move each element up or down by some roundings of its dtype."""
    if not _is_inexact(x.dtype) or not x.numel():
        return x
    eps, _ = epsilons(x.dtype, coarse)
    source = torch.Generator().manual_seed(seed)
    wide = x.to(torch.complex128 if x.is_complex() else torch.float64)
    share = torch.rand(x.shape, generator=source, dtype=torch.float64).to(x.device) * 2 - 1
    return (wide * (1 + MOVED * eps * share)).to(x.dtype)


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Return a value in a dtype in which its differences do not round."""
    if x.is_complex():
        return x.to(torch.complex128)
    return x.double() if x.dtype in (torch.float32, torch.float64) else x.float()


def _same_special(y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Mask the elements that are the same infinity, or nan in both."""
    return (y == z) | (torch.isnan(y) & torch.isnan(z))


def _rms(size: torch.Tensor, finite: torch.Tensor) -> float:
    kept = size[finite]
    return float(kept.square().mean().sqrt()) if kept.numel() else 0.0


def _response(again: Again) -> torch.Tensor | None:
    """Estimate how far each element moves where inputs are rounded anew: the largest of some
    samples, and at least the product of the means of its row and its column.
    """
    start = again(None)
    if not isinstance(start, torch.Tensor):
        return None
    largest = torch.zeros_like(_wide(start).abs())
    for seed in range(SAMPLES):
        result = again(seed)
        if not isinstance(result, torch.Tensor) or result.shape != start.shape:
            return None
        moved = torch.nan_to_num((_wide(result) - _wide(start)).abs())
        largest = torch.maximum(largest, moved)
    return torch.maximum(largest, _of_row_and_column(largest))


def _of_row_and_column(x: torch.Tensor) -> torch.Tensor:
    if x.dim() < 2:
        return x.mean() if x.dim() else x
    total = x.mean((-2, -1), keepdim=True)
    product = x.mean(-1, keepdim=True) * x.mean(-2, keepdim=True)
    return torch.where(total > 0, product / total, total)
