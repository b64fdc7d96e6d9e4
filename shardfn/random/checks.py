"""Checks of the arguments of random functions."""

from __future__ import annotations

from typing import Any

import torch

from .. import _compat
from ..errors import ShardError, problem
from ..ops.random_bits import DTYPES, SIGNIFICANT

FLOATING = tuple(SIGNIFICANT)


def dims_of(shape: int | tuple[int, ...]) -> tuple[int, ...]:
    """A shape as a tuple; an int is one dim."""
    return (shape,) if isinstance(shape, int) else tuple(shape)


def floating(dtype: torch.dtype | None) -> torch.dtype:
    """A dtype, torch's default one for None."""
    return torch.get_default_dtype() if dtype is None else dtype


def check_key(where: str, key: Any) -> None:
    """Check that an argument is one key.

    Raises:
        ShardError: it is something else, or several keys.
    """
    if isinstance(key, torch.Tensor):
        refuse_key(where, tuple(key.shape), str(key.dtype))
    else:
        refuse_key(where, None, type(key).__name__)


@_compat.constant_in_graph
def refuse_key(where: str, shape: tuple[int, ...] | None, kind: str) -> None:
    """Refuse anything but a key.

    Args:
        where: the function.
        shape: of a tensor, None of anything else.
        kind: its dtype, or its class.

    Raises:
        ShardError: it is not an int64 tensor of shape (2,).
    """
    if (shape, kind) == ((2,), "torch.int64"):
        return
    if shape is not None and shape[-1:] == (2,) and kind == "torch.int64":
        got = f"key is a batch of keys, of shape {shape}"
        fix = "one key, such as keys[0]; or sf.vmap over the keys"
    else:
        got = f"key is a {kind}" + ("" if shape is None else f" of shape {shape}")
        fix = "sf.random.key(seed), or a part of sf.random.split(key)"
    text = problem(where, got, needed="a key: int64 of shape (2,)", fix=fix)
    raise ShardError(text, arg_path="key", fix=fix)


@_compat.constant_in_graph
def check_shape(where: str, shape: tuple[int, ...]) -> None:
    """Check that a shape is one.

    Raises:
        ShardError: a size that is negative or no int.
    """
    if not all(
        isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape
    ):
        fix = "sizes of 0 or more"
        text = problem(where, f"shape is {tuple(shape)}", needed="a shape", fix=fix)
        raise ShardError(text, arg_path="shape", fix=fix)


@_compat.constant_in_graph
def check_dtype(where: str, dtype: Any, allowed: tuple[torch.dtype, ...]) -> None:
    """Check that a function makes numbers of a dtype.

    Raises:
        ShardError: it does not.
    """
    if dtype not in allowed:
        fix = "dtype=" + " or ".join(str(d) for d in allowed)
        text = problem(where, f"dtype is {dtype}", fix=fix)
        raise ShardError(text, arg_path="dtype", fix=fix)


@_compat.constant_in_graph
def check_probability(where: str, name: str, value: Any) -> None:
    """Check that a number is a probability.

    Raises:
        ShardError: it is not between 0 and 1.
    """
    if not 0 <= value <= 1:
        fix = f"{name} from 0 to 1"
        text = problem(where, f"{name} is {value}", needed="a probability", fix=fix)
        raise ShardError(text, arg_path=name, fix=fix)


@_compat.constant_in_graph
def check_range(where: str, low: Any, high: Any) -> None:
    """Check that a range holds a number.

    Raises:
        ShardError: maxval is not above minval.
    """
    if not low < high:
        fix = "minval < maxval"
        text = problem(where, f"minval is {low}, maxval is {high}", fix=fix)
        raise ShardError(text, arg_path="maxval", fix=fix)


@_compat.constant_in_graph
def check_device(where: str, key: str, other: str) -> None:
    """Check that a key is where the numbers are needed.

    Raises:
        ShardError: it is on another device.
    """
    if key != other:
        fix = f"key.to({other!r})"
        text = problem(
            where, f"key is on {key}", needed=f"a key on {other}", fix=fix
        )
        raise ShardError(text, arg_path="key", fix=fix)


@_compat.constant_in_graph
def check_ends(where: str, shape: tuple[int, ...], needed: tuple[int, ...]) -> None:
    """Check that a shape ends in the shape of a parameter.

    Raises:
        ShardError: it does not.
    """
    if shape[len(shape) - len(needed) :] != needed:
        fix = f"shape=(..., {', '.join(map(str, needed))})"
        text = problem(
            where, f"shape is {shape}", needed=f"one that ends in {needed}", fix=fix
        )
        raise ShardError(text, arg_path="shape", fix=fix)


def checked_draw(
    where: str,
    key: Any,
    shape: int | tuple[int, ...],
    dtype: torch.dtype,
    allowed: tuple[torch.dtype, ...] = DTYPES,
) -> tuple[int, ...]:
    """The shape of a draw as a tuple, all arguments checked.

    Raises:
        ShardError: see the checks.
    """
    check_key(where, key)
    dims = dims_of(shape)
    check_shape(where, dims)
    check_dtype(where, dtype, allowed)
    return dims
