"""The checks of the arguments of random functions: keys, shapes, dtypes, parameters, ranges."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from .. import _compat
from ..errors import ShardError, problem
from ..ops.random_bits import DTYPES, SIGNIFICANT

FLOATING = tuple(SIGNIFICANT)
MOST_INTEGERS = 2**63  # integers in a range: a draw has so many values


def dims_of(shape: int | tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape as a tuple; a number is one dim."""
    return (shape,) if isinstance(shape, (int, float)) else tuple(shape)


def floating_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """Return a dtype, or torch's default one for None."""
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
    """Refuse anything but one key.

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
        fix = "pass one key, such as keys[0]; or use sf.vmap over the keys"
    else:
        got = f"key is a {kind}" + ("" if shape is None else f" of shape {shape}")
        fix = "use sf.random.key(seed), or one of the keys of sf.random.split(key)"
    text = problem(where, got, needed="a key: int64 of shape (2,)", fix=fix)
    raise ShardError(text, arg_path="key", fix=fix)


@_compat.constant_in_graph
def check_shape(where: str, shape: tuple[int, ...]) -> None:
    """Check that all sizes of a shape are ints of 0 or more.

    Raises:
        ShardError: a size that is negative or no int.
    """
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape):
        fix = "sizes of 0 or more"
        text = problem(where, f"shape is {tuple(shape)}", needed="a shape", fix=fix)
        raise ShardError(text, arg_path="shape", fix=fix)


@_compat.constant_in_graph
def check_dtype(where: str, dtype: Any, allowed: tuple[torch.dtype, ...]) -> None:
    """Check that a random function can make numbers of a dtype.

    Raises:
        ShardError: it does not.
    """
    if dtype not in allowed:
        fix = "dtype=" + " or ".join(str(d) for d in allowed)
        text = problem(where, f"dtype is {dtype}", fix=fix)
        raise ShardError(text, arg_path="dtype", fix=fix)


NUMBER_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {  # what a number must be, and the fix
    "a probability": (lambda x: 0 <= x <= 1, "from 0 to 1"),
    "a probability between 0 and 1": (lambda x: 0 < x < 1, "above 0 and below 1"),
    "a number above 0": (lambda x: x > 0, "> 0"),
    "a number of 0 or more": (lambda x: x >= 0, ">= 0"),
}


@_compat.constant_in_graph
def check_number(where: str, name: str, value: Any, needed: str) -> None:
    """Check that a parameter satisfies the rule of its distribution; a tensor's values are not
    read.

    Args:
        where: the function.
        name: of the parameter.
        value: a number.
        needed: a key of RULES.

    Raises:
        ShardError: the rule does not hold.
    """
    holds, range_ = NUMBER_RULES[needed]
    if not isinstance(value, torch.Tensor) and not _rule_holds(holds, value):
        fix = f"{name} {range_}"
        raise ShardError.of(where, f"{name} is {value!r}", needed=needed, fix=fix, arg_path=name)


def _rule_holds(rule: Callable[..., Any], *values: Any) -> bool:
    """Return whether a rule holds of some values. It holds of none that are not numbers."""
    try:
        return bool(rule(*values))
    except TypeError:
        return False


@_compat.constant_in_graph
def check_interval(where: str, low: Any, high: Any) -> None:
    """Check that an interval of real numbers does not end before it starts.

    Raises:
        ShardError: it ends before it starts.
    """
    if not _rule_holds(operator.le, low, high):
        got = f"the range must not be empty; got start {low!r} and end {high!r}"
        raise ShardError.of(where, got, fix="low <= high", arg_path="high")


@_compat.constant_in_graph
def check_range(where: str, low: int, high: int, dtype: torch.dtype) -> None:
    """Check that a range of integers is not empty, and that a dtype holds all of them.

    Args:
        where: the function.
        low: the least integer.
        high: one above the largest.
        dtype: of the result; of a floating one only the order of the bounds is checked.

    Raises:
        ShardError: a bound is no integer, high is not above low, an integer that the dtype has not,
            or more than 2**63 integers.
    """
    got = f"minval is {low!r}, maxval is {high!r}"
    if not all(hasattr(x, "__index__") for x in (low, high)):
        raise ShardError.of(where, got, needed="integers", fix="minval=int(...), maxval=int(...)")
    if not _rule_holds(operator.lt, low, high):
        raise ShardError.of(where, got, fix="minval < maxval", arg_path="maxval")
    if high - low > MOST_INTEGERS:
        got = f"the range from {low} to {high} has more than 2**63 integers"
        fix = "sf.random.bits(key, shape, torch.int64), or a smaller range"
        raise ShardError.of(where, got, fix=fix, arg_path="maxval")
    if dtype.is_floating_point:
        return
    first, last = integers_of(dtype)
    if low < first or high - 1 > last:
        got = f"the range from {low} to {high} does not fit {dtype}"
        needed = f"integers from {first} to {last}"
        fix = "dtype=torch.int64, or a smaller range"
        raise ShardError.of(where, got, needed=needed, fix=fix, arg_path="dtype")


def integers_of(dtype: torch.dtype) -> tuple[int, int]:
    """Return the least and the largest integer of an integer dtype or bool."""
    if dtype == torch.bool:
        return 0, 1
    info = torch.iinfo(dtype)
    return info.min, info.max


@_compat.constant_in_graph
def check_device(where: str, key: str, other: str) -> None:
    """Check that a key is on the device where the numbers are needed.

    Raises:
        ShardError: it is on another device.
    """
    if key != other:
        fix = f"key.to({other!r})"
        text = problem(where, f"key is on {key}", needed=f"a key on {other}", fix=fix)
        raise ShardError(text, arg_path="key", fix=fix)


@_compat.constant_in_graph
def check_ends(where: str, shape: tuple[int, ...], needed: tuple[int, ...]) -> None:
    """Check that a shape ends in the shape of a parameter.

    Raises:
        ShardError: it does not.
    """
    if shape[len(shape) - len(needed) :] != needed:
        fix = f"shape=(..., {', '.join(map(str, needed))})"
        text = problem(where, f"shape is {shape}", needed=f"a shape that ends in {needed}", fix=fix)
        raise ShardError(text, arg_path="shape", fix=fix)


@_compat.constant_in_graph
def check_weights(where: str, shape: tuple[int, ...], needed: tuple[int, ...]) -> None:
    """Check that there is one probability for each element.

    Raises:
        ShardError: there are others.
    """
    if shape != needed:
        fix = f"p of shape {needed}"
        got = f"p has the shape {shape}"
        raise ShardError.of(where, got, needed="one probability for each element", fix=fix)


@_compat.constant_in_graph
def check_count(where: str, count: int | str, n: int | str, replace: bool) -> None:
    """Check that so many of n elements can be chosen.

    Raises:
        ShardError: they cannot.
    """
    if isinstance(count, str) or isinstance(n, str):  # of sizes that are symbols
        return
    if count and (n < 1 or (count > n and not replace)):
        got = f"{count} of {n} elements are asked for"
        fix = "replace=True" if n > 0 else "an array that is not empty"
        raise ShardError.of(where, got, needed="as many elements", fix=fix, arg_path="shape")


@_compat.constant_in_graph
def check_axis(where: str, axis: int, dims: int) -> None:
    """Check that a tensor has a dim.

    Raises:
        ShardError: it has not.
    """
    if not -dims <= axis < dims:
        got = f"axis is {axis}, and the tensor has {dims} dims"
        fix = f"axis=0, or another up to {dims - 1}" if dims else "a tensor with a dim"
        raise ShardError.of(where, got, fix=fix, arg_path="axis")


@_compat.constant_in_graph
def check_kind(where: str, name: str, got: str, needed: str, holds: bool) -> None:
    """Check that an argument is of the kind that a function takes.

    Args:
        where: the function.
        name: of the argument.
        got: what it is.
        needed: what it must be.
        holds: whether it is.

    Raises:
        ShardError: it is not.
    """
    if not holds:
        got = f"{name} is {got}"
        raise ShardError.of(where, got, needed=needed, fix=f"pass {needed}", arg_path=name)


def check_draw(
    where: str,
    key: Any,
    shape: int | tuple[int, ...],
    dtype: torch.dtype,
    allowed: tuple[torch.dtype, ...] = DTYPES,
) -> tuple[int, ...]:
    """Check the key, the shape and the dtype of a draw, and return the shape as a tuple.

    Raises:
        ShardError: see the checks.
    """
    check_key(where, key)
    dims = dims_of(shape)
    check_shape(where, _compat.signs(dims))
    check_dtype(where, dtype, allowed)
    return dims
