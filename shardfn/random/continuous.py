"""Random real numbers: `uniform`, `normal`, `truncated_normal`, `exponential`, `gumbel`, `gamma`,
`beta`.
"""

from __future__ import annotations

import math

import torch

from .. import _compat
from . import from_uniform
from .checks import FLOATING, check_draw, check_ends, check_number, dims_of, floating_dtype
from .from_uniform import compute_dtype, positive
from .keys import draw, split

Number = float | torch.Tensor
ATTEMPTS = 12  # one in 20 is rejected at most: all of 12 once in 10**15


def uniform(
    key: torch.Tensor,
    shape: int | tuple[int, ...] = (),
    dtype: torch.dtype | None = None,
    minval: Number = 0.0,
    maxval: Number = 1.0,
) -> torch.Tensor:
    """Draw uniformly distributed numbers in [minval, maxval).

    Args:
        key: a random key, int64 (2,).
        shape: the global shape of the result.
        dtype: a floating-point dtype; by default, torch's default dtype.
        minval: the lower end of the range, inclusive; a tensor is broadcast to the shape of the
            result.
        maxval: the upper end of the range, exclusive.

    Returns:
        A tensor with the given shape and dtype, with 53, 24, 11 or 8 random bits for float64,
        float32, float16 or bfloat16.

    Raises:
        ShardError: key is not a random key, a size is negative, or dtype is not floating-point.

    Source: jax.random.uniform; Salmon et al. 2011 (Philox).

    Example:
        >>> import shardfn as sf
        >>> sf.random.uniform(sf.random.key(0), (2, 3)).shape
        torch.Size([2, 3])
    """
    dtype = floating_dtype(dtype)
    dims = check_draw("random.uniform", key, shape, dtype, FLOATING)
    unit = draw(key, dims, dtype)
    if (
        not isinstance(minval, torch.Tensor)
        and not isinstance(maxval, torch.Tensor)
        and (minval, maxval) == (0, 1)
    ):
        return unit
    scaled = (unit * (maxval - minval) + minval).to(dtype)
    low = torch.as_tensor(minval, dtype=dtype, device=key.device)
    return torch.maximum(scaled, low)


def normal(
    key: torch.Tensor, shape: int | tuple[int, ...] = (), dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Draw normally distributed numbers with mean 0 and variance 1.

    Args:
        key: a random key, int64 (2,).
        shape: the global shape of the result.
        dtype: a floating-point dtype; by default, torch's default dtype.

    Returns:
        A tensor with the given shape and dtype.

    Raises:
        ShardError: key is not a random key, a size is negative, or dtype is not floating-point.

    Source: jax.random.normal, by the inverse of the error function.

    Example:
        >>> import shardfn as sf
        >>> bool(sf.random.normal(sf.random.key(0), (1000,)).mean().abs() < 0.1)
        True
    """
    dtype = floating_dtype(dtype)
    dims = check_draw("random.normal", key, shape, dtype, FLOATING)
    return from_uniform.normal(draw(key, dims, compute_dtype(dtype))).to(dtype)


def truncated_normal(
    key: torch.Tensor,
    lower: Number,
    upper: Number,
    shape: int | tuple[int, ...] | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Draw normally distributed numbers that lie between two bounds.

    Args:
        key: a random key, int64 (2,).
        lower: the lower bound, in standard deviations; a tensor is broadcast to the shape of the
            result.
        upper: the upper bound, in standard deviations.
        shape: the global shape of the result; by default, the broadcast shape of the bounds.
        dtype: a floating-point dtype; by default, torch's default dtype.

    Returns:
        A tensor with the given shape and dtype, with lower <= value <= upper.

    Raises:
        ShardError: key is not a random key, a size is negative, or dtype is not floating-point.

    Source: jax.random.truncated_normal.

    Example:
        >>> import shardfn as sf
        >>> bool((sf.random.truncated_normal(sf.random.key(0), -1.0, 2.0, (9,)) >= -1).all())
        True
    """
    dtype = floating_dtype(dtype)
    computed = compute_dtype(dtype)
    low = torch.as_tensor(lower, dtype=computed, device=key.device)
    high = torch.as_tensor(upper, dtype=computed, device=key.device)
    common = tuple(torch.broadcast_shapes(low.shape, high.shape))
    shape = common if shape is None else dims_of(shape)
    dims = check_draw("random.truncated_normal", key, shape, dtype, FLOATING)
    first = torch.erf(low / math.sqrt(2))
    last = torch.erf(high / math.sqrt(2))
    value = from_uniform.truncated_normal(draw(key, dims, computed), first, last)
    return torch.minimum(torch.maximum(value, low), high).to(dtype)


def exponential(
    key: torch.Tensor, shape: int | tuple[int, ...] = (), dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Draw exponentially distributed numbers with mean 1.

    Args:
        key: a random key, int64 (2,).
        shape: the global shape of the result.
        dtype: a floating-point dtype; by default, torch's default dtype.

    Returns:
        A tensor with the given shape and dtype.

    Raises:
        ShardError: key is not a random key, a size is negative, or dtype is not floating-point.

    Source: jax.random.exponential.

    Example:
        >>> import shardfn as sf
        >>> bool((sf.random.exponential(sf.random.key(0), (9,)) >= 0).all())
        True
    """
    dtype = floating_dtype(dtype)
    dims = check_draw("random.exponential", key, shape, dtype, FLOATING)
    return from_uniform.exponential(draw(key, dims, compute_dtype(dtype))).to(dtype)


def gumbel(
    key: torch.Tensor, shape: int | tuple[int, ...] = (), dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Draw numbers with the standard Gumbel distribution.

    Args:
        key: a random key, int64 (2,).
        shape: the global shape of the result.
        dtype: a floating-point dtype; by default, torch's default dtype.

    Returns:
        A tensor with the given shape and dtype.

    Raises:
        ShardError: key is not a random key, a size is negative, or dtype is not floating-point.

    Source: jax.random.gumbel.

    Example:
        >>> import shardfn as sf
        >>> sf.random.gumbel(sf.random.key(0), (2,)).shape
        torch.Size([2])
    """
    dtype = floating_dtype(dtype)
    dims = check_draw("random.gumbel", key, shape, dtype, FLOATING)
    return from_uniform.gumbel(draw(key, dims, compute_dtype(dtype))).to(dtype)


def gamma(
    key: torch.Tensor,
    a: Number,
    shape: int | tuple[int, ...] | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Draw numbers from a gamma distribution of scale 1, differentiable with respect to its shape
    parameter.

    Args:
        key: a random key, int64 (2,).
        a: the shape parameter of the gamma distribution, above 0; a tensor is broadcast to the
            shape of the result.
        shape: the global shape of the result. The last dims of `shape` must equal the shape of `a`.
            By default, `shape` is the shape of `a`.
        dtype: a floating-point dtype; by default, torch's default dtype.

    Returns:
        A tensor with the given shape and dtype.

    Raises:
        ShardError: key is not a random key, `a` is a number of 0 or less, a size is negative, the
            last dims of `shape` differ from the shape of `a`, or dtype is not floating-point.

    Source: jax.random.gamma; Marsaglia and Tsang, A Simple Method for Generating Gamma Variables
        (ACM TOMS 2000); the derivative is that of torch.distributions.Gamma.rsample.

    Example:
        >>> import shardfn as sf
        >>> bool((sf.random.gamma(sf.random.key(0), 2.5, (9,)) > 0).all())
        True
    """
    dtype = floating_dtype(dtype)
    computed = compute_dtype(dtype)
    if not isinstance(a, torch.Tensor):
        check_number("random.gamma", "a", a, "a number above 0")
    parameter = torch.as_tensor(a, dtype=computed, device=key.device)
    parameter_shape = tuple(parameter.shape)
    shape = parameter_shape if shape is None else dims_of(shape)
    check_ends("random.gamma", _compat.sizes_named(shape), _compat.sizes_named(parameter_shape))
    dims = check_draw("random.gamma", key, shape, dtype, FLOATING)
    parameter = parameter.expand(dims)
    fixed = parameter.detach()
    value = _sample_gamma(key, fixed, dims)
    slope = torch.ops.aten._standard_gamma_grad.default(fixed, value)
    return (value + (parameter - fixed) * slope).to(dtype)


def _sample_gamma(key: torch.Tensor, a: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Sample by Marsaglia's and Tsang's method: of several attempts, take the first that is
    accepted.

    All attempts are one tensor: written one after the other, they are code that takes a compiler
    minutes.
    """
    keys = split(key, 2 * ATTEMPTS + 1)  # (2 * ATTEMPTS + 1, 2)
    d = torch.where(a < 1, a + 1, a) - 1 / 3  # shape
    x = from_uniform.normal(draw(keys[0:-1:2], shape, a.dtype))  # (ATTEMPTS, *shape)
    u = positive(draw(keys[1:-1:2], shape, a.dtype))
    cube = (1 + x / torch.sqrt(9 * d)) ** 3
    accepted = (cube > 0) & (torch.log(u) < _log_acceptance(x, d, cube))
    rank = torch.arange(ATTEMPTS, 0, -1, device=key.device)
    rank = rank.view(ATTEMPTS, *[1] * len(shape)) * accepted  # most for the first
    first = rank.amax(0)
    chosen = torch.where(accepted & (rank == first), d * cube, 0).sum(0)
    value = torch.where(first > 0, chosen, d)
    u = positive(draw(keys[-1], shape, a.dtype))
    return torch.where(a < 1, value * torch.exp(torch.log(u) / a), value)


def _log_acceptance(x: torch.Tensor, d: torch.Tensor, cube: torch.Tensor) -> torch.Tensor:
    """Return the logarithm below which a uniform number accepts an attempt."""
    return 0.5 * x * x + d - d * cube + d * torch.log(positive(cube))


def beta(
    key: torch.Tensor,
    a: Number,
    b: Number,
    shape: int | tuple[int, ...] | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Draw numbers from a beta distribution, differentiable with respect to its parameters.

    Args:
        key: a random key, int64 (2,).
        a: the first parameter of the beta distribution, above 0; a tensor is broadcast to the shape
            of the result.
        b: the second parameter of the beta distribution, above 0; a tensor is broadcast to the
            shape of the result.
        shape: the global shape of the result; by default, the broadcast shape of `a` and `b`.
        dtype: a floating-point dtype; by default, torch's default dtype.

    Returns:
        A tensor with the given shape and dtype, and with values between 0 and 1.

    Raises:
        ShardError: key is not a random key, a parameter is a number of 0 or less, a size is
            negative, the last dims of `shape` differ from the broadcast shape of `a` and `b`, or
            dtype is not floating-point.

    Source: jax.random.beta.

    Example:
        >>> import shardfn as sf
        >>> bool((sf.random.beta(sf.random.key(0), 2.0, 3.0, (9,)) < 1).all())
        True
    """
    dtype = floating_dtype(dtype)
    computed = compute_dtype(dtype)
    for name, value in (("a", a), ("b", b)):
        if not isinstance(value, torch.Tensor):
            check_number("random.beta", name, value, "a number above 0")
    first = torch.as_tensor(a, dtype=computed, device=key.device)
    second = torch.as_tensor(b, dtype=computed, device=key.device)
    common = tuple(torch.broadcast_shapes(first.shape, second.shape))
    shape = common if shape is None else dims_of(shape)
    keys = split(key)
    x = gamma(keys[0], first.expand(common), shape, computed)
    y = gamma(keys[1], second.expand(common), shape, computed)
    return (x / (x + y)).to(dtype)
