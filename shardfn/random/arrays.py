"""Random choices from arrays: `permutation`, `choice`, `dropout`."""

from __future__ import annotations

import math

import torch

from .. import _compat
from .checks import (
    check_axis,
    check_count,
    check_device,
    check_kind,
    check_number,
    check_shape,
    check_weights,
    dims_of,
    floating_dtype,
)
from .continuous import gumbel
from .discrete import bits, randint
from .keys import draw


def permutation(
    key: torch.Tensor, x: int | torch.Tensor, axis: int = 0, independent: bool = False
) -> torch.Tensor:
    """Shuffle a tensor along a dim, or shuffle the integers below n.

    Args:
        key: a random key, int64 (2,).
        x: a tensor to shuffle, or a number n to shuffle the integers below n.
        axis: the dim to shuffle.
        independent: whether each 1-D slice along `axis` is shuffled separately.

    Returns:
        A tensor with the shape and dtype of x, or an int64 tensor of shape (n,).

    Raises:
        ShardError: key is not a random key, x is negative or has no dim `axis`.

    Source: jax.random.permutation, by sorting random 64-bit numbers.

    Example:
        >>> import shardfn as sf
        >>> sf.random.permutation(sf.random.key(0), 5).sort().values
        tensor([0, 1, 2, 3, 4])
    """
    if isinstance(x, int):
        check_shape("random.permutation", _compat.signs((x,)))
        return torch.argsort(bits(key, (x,), torch.int64), stable=True)
    check_axis("random.permutation", axis, x.dim())
    if independent:
        order = torch.argsort(bits(key, tuple(x.shape), torch.int64), dim=axis, stable=True)
        return torch.gather(x, axis, order)
    order = torch.argsort(bits(key, (x.shape[axis],), torch.int64), stable=True)
    return torch.index_select(x, axis, order)


def choice(
    key: torch.Tensor,
    a: int | torch.Tensor,
    shape: int | tuple[int, ...] = (),
    replace: bool = True,
    p: torch.Tensor | None = None,
    axis: int = 0,
) -> torch.Tensor:
    """Choose random elements of an array, with or without replacement.

    Args:
        key: a random key, int64 (2,).
        a: a tensor to choose from, or a number n to choose from the integers below n.
        shape: the shape that replaces the dim `axis` in the result.
        replace: whether an element may be chosen more than once.
        p: the probability of each element, of shape (n,); by default, all probabilities are equal.
        axis: the dim of `a` to choose along.

    Returns:
        A tensor with the elements of `a`, in which dims of the given shape replace the dim `axis`.

    Raises:
        ShardError: key is not a random key, a size is negative, a has no dim `axis`, p has another
            shape than (n,), or more elements are asked for than can be chosen.

    Source: jax.random.choice; without replacement by Gumbel-top-k (Kool et al., ICML 2019).

    Example:
        >>> import torch, shardfn as sf
        >>> sf.random.choice(sf.random.key(0), torch.tensor([3, 3, 3]), (2,))
        tensor([3, 3])
    """
    dims = dims_of(shape)
    check_shape("random.choice", _compat.signs(dims))
    if not isinstance(a, int):
        check_axis("random.choice", axis, a.dim())
    n = a if isinstance(a, int) else a.shape[axis]
    if p is not None:
        given = _compat.sizes_named(p.shape), _compat.sizes_named((n,))
        check_weights("random.choice", *given)
    check_count("random.choice", *_compat.sizes_named((math.prod(dims), n)), replace)
    index = _choose_positions(key, n, dims, replace, p)
    if isinstance(a, int):
        return index
    rows = torch.index_select(a, axis, index.reshape(-1))
    axis = axis % a.dim()
    return rows.reshape(*a.shape[:axis], *dims, *a.shape[axis + 1 :])


def _choose_positions(
    key: torch.Tensor, n: int, shape: tuple[int, ...], replace: bool, p: torch.Tensor | None
) -> torch.Tensor:
    """Draw the positions to choose, of n."""
    count = 1
    for size in shape:
        count *= size
    if not replace:
        if p is None:
            order = permutation(key, n)
        else:
            order = torch.argsort(gumbel(key, (n,), p.dtype) + torch.log(p), descending=True)
        return order[:count].reshape(shape)
    if p is None:
        return randint(key, shape, 0, n)
    ends = torch.cumsum(p, 0)
    u = draw(key, shape, p.dtype) * ends[-1]
    return torch.searchsorted(ends, u, right=True).clamp_max(n - 1)


def dropout(key: torch.Tensor, x: torch.Tensor, rate: float = 0.5) -> torch.Tensor:
    """Set random elements of a tensor to zero, and scale the other elements to keep the mean.

    Args:
        key: a random key, int64 (2,), on the device of x.
        x: a floating-point tensor of any shape.
        rate: the probability that an element becomes zero, from 0 to 1.

    Returns:
        A tensor with the shape and dtype of x. The elements that `dropout` keeps are divided by 1 -
        rate.

    Raises:
        ShardError: key is not a random key or is on another device, x is not floating-point, or
            rate is outside of [0, 1].

    Source: Srivastava et al., Dropout (JMLR 2014); flax.linen.Dropout.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.random.dropout(sf.random.key(0), torch.ones(3), 0.0)
        tensor([1., 1., 1.])
    """
    check_number("random.dropout", "rate", rate, "a probability")
    check_device("random.dropout", str(key.device), str(x.device))
    is_real = x.dtype.is_floating_point or x.dtype.is_complex
    check_kind("random.dropout", "x", f"a {x.dtype} tensor", "a floating-point tensor", is_real)
    keep_rate = 1 - rate
    if not keep_rate:
        return torch.zeros_like(x)
    is_kept = draw(key, tuple(x.shape), floating_dtype(torch.float32)) < keep_rate
    return torch.where(is_kept, x * (1 / keep_rate), 0)
