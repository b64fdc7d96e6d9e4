"""Random integers and truth values: `bits`, `bernoulli`, `randint`, `categorical`."""

from __future__ import annotations

import torch

from .. import _compat
from ..ops.random_bits import WIDTH
from .checks import check_draw, check_ends, check_number, check_range, dims_of, floating_dtype
from .continuous import gumbel
from .from_uniform import positive
from .keys import draw, split

INTEGERS = tuple(WIDTH)
LARGEST = 2**63 - 1


def bits(
    key: torch.Tensor, shape: int | tuple[int, ...] = (), dtype: torch.dtype = torch.int32
) -> torch.Tensor:
    """Draw integers whose bits are all random.

    Args:
        key: a random key, int64 (2,).
        shape: the global shape of the result.
        dtype: an integer dtype, or bool.

    Returns:
        A tensor with the given shape and dtype.

    Raises:
        ShardError: key is not a random key, a size is negative, or dtype is not an integer dtype.

    Source: jax.random.bits; Salmon et al. 2011 (Philox).

    Example:
        >>> import torch, shardfn as sf
        >>> sf.random.bits(sf.random.key(0), (2,), torch.uint8).dtype
        torch.uint8
    """
    dims = check_draw("random.bits", key, shape, dtype, INTEGERS)
    return draw(key, dims, dtype)


def bernoulli(
    key: torch.Tensor, p: float | torch.Tensor = 0.5, shape: int | tuple[int, ...] | None = None
) -> torch.Tensor:
    """Draw bools that are True with probability p.

    Args:
        key: a random key, int64 (2,).
        p: the probability of True, from 0 to 1; a tensor is broadcast to the shape of the result.
        shape: the global shape of the result; by default, the shape of `p`.

    Returns:
        A bool tensor with the given shape.

    Raises:
        ShardError: key is not a random key, a size is negative, or p is outside of [0, 1].

    Source: jax.random.bernoulli.

    Example:
        >>> import shardfn as sf
        >>> sf.random.bernoulli(sf.random.key(0), 1.0, (3,))
        tensor([True, True, True])
    """
    if isinstance(p, torch.Tensor):
        dtype = p.dtype
        parameter_shape = tuple(p.shape)
    else:
        check_number("random.bernoulli", "p", p, "a probability")
        dtype = floating_dtype(None)
        parameter_shape = ()
    dims = check_draw("random.bernoulli", key, parameter_shape if shape is None else shape, dtype)
    return draw(key, dims, dtype) < p


def randint(
    key: torch.Tensor,
    shape: int | tuple[int, ...],
    minval: int | torch.Tensor,
    maxval: int | torch.Tensor,
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:
    """Draw uniformly distributed integers in [minval, maxval).

    Args:
        key: a random key, int64 (2,).
        shape: the global shape of the result.
        minval: the lower end of the range, inclusive; a tensor is broadcast to the shape of the
            result.
        maxval: the upper end of the range, exclusive.
        dtype: an integer dtype.

    Returns:
        A tensor with the given shape and dtype.

    Raises:
        ShardError: key is not a random key, a size is negative, the range is empty, or dtype cannot
            represent the integers of the range.

    Source: jax.random.randint; 63 random bits modulo the size of the range.

    Example:
        >>> import shardfn as sf
        >>> bool((sf.random.randint(sf.random.key(0), (99,), 0, 10) < 10).all())
        True
    """
    dims = check_draw("random.randint", key, shape, dtype, INTEGERS)
    if not isinstance(minval, torch.Tensor) and not isinstance(maxval, torch.Tensor):
        check_range("random.randint", minval, maxval, dtype)
    number = draw(key, dims, torch.int64) & LARGEST
    return (number % (maxval - minval) + minval).to(dtype)


def categorical(
    key: torch.Tensor,
    logits: torch.Tensor,
    axis: int = -1,
    shape: int | tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Draw indices with the probabilities softmax(logits).

    Args:
        key: a random key, int64 (2,).
        logits: a floating-point tensor (..., classes, ...) of logarithms of probabilities, up to a
            constant.
        axis: the dim of the classes.
        shape: the global shape of the result. The last dims of `shape` must equal the shape of the
            logits without the dim `axis`. By default, `shape` is the shape of the logits without
            the dim `axis`.

    Returns:
        An int64 tensor with the given shape, with indices from 0 to classes - 1.

    Raises:
        ShardError: key is not a random key, or the last dims of `shape` differ from the shape of
            the logits without the dim `axis`.

    Source: jax.random.categorical; the Gumbel-max trick.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.random.categorical(sf.random.key(0), torch.tensor([0.0, 99.0]))
        tensor(1)
    """
    dim = axis % logits.dim()
    logits_shape = tuple(logits.shape)
    batch = logits_shape[:dim] + logits_shape[dim + 1 :]
    dims = batch if shape is None else dims_of(shape)
    check_ends("random.categorical", _compat.sizes_named(dims), _compat.sizes_named(batch))
    prefix = dims[: len(dims) - len(batch)]
    noise = gumbel(key, (*prefix, *logits_shape), logits.dtype)
    return torch.argmax(logits + noise, dim=len(prefix) + dim)


LARGE_RATE = 10  # from which on a Poisson number is drawn by rejection
COUNTS = 48  # more come once in 10**16 below that rate
TRIES = 24  # at most one in four is rejected


def sample_poisson(key: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
    """Draw numbers with a Poisson distribution of these rates, as float64.

    Source: jax.random.poisson; Hoermann, The Transformed Rejection Method for Generating Poisson
    Random Variables (1993), algorithm PTRS.
    """
    rate = rate.detach().double()
    keys = split(key, 3)
    small, large = rate.clamp_max(LARGE_RATE), rate.clamp_min(LARGE_RATE)
    by_rejection = _by_rejection(keys[0], keys[1], large)
    counts = torch.where(rate < LARGE_RATE, _by_inversion(keys[2], small), by_rejection)
    return torch.where(rate >= 0, counts, torch.nan)


def _by_inversion(key: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
    """Count the numbers whose probability, summed up, is below a uniform number."""
    k = torch.arange(COUNTS, dtype=rate.dtype, device=rate.device)
    k = k.view(COUNTS, *[1] * rate.dim())
    probabilities = torch.exp(torch.xlogy(k, rate) - rate - torch.lgamma(k + 1))
    u = draw(key, tuple(rate.shape), rate.dtype)
    return (u >= probabilities.cumsum(0)).sum(0).to(rate.dtype)


def _by_rejection(first: torch.Tensor, second: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
    """Take the first of several tries that is accepted."""
    shape = TRIES, *rate.shape
    b = 0.931 + 2.53 * rate.sqrt()
    a = -0.059 + 0.02483 * b
    u = draw(first, shape, rate.dtype) - 0.5
    v = positive(draw(second, shape, rate.dtype))
    distance = 0.5 - u.abs()
    k = torch.floor((2 * a / distance + b) * u + rate + 0.43)
    scaled = v * (1.1239 + 1.1328 / (b - 3.4)) / (a / distance**2 + b)
    is_likely = scaled.log() <= torch.xlogy(k, rate) - rate - torch.lgamma(k.clamp_min(0) + 1)
    is_inside = (distance >= 0.07) & (v <= 0.9277 - 3.6224 / (b - 2))
    is_outside = (k < 0) | ((distance < 0.013) & (v > distance))
    is_taken = is_inside | (is_likely & ~is_outside)
    order = torch.arange(TRIES, 0, -1, device=rate.device)
    order = order.view(TRIES, *[1] * rate.dim()) * is_taken  # most for the first
    best = order.amax(0)
    chosen = torch.where(is_taken & (order == best), k, 0).sum(0)
    return torch.where(best > 0, chosen, rate.floor())
