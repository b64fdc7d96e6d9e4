"""A step of an optimizer as a graph: numbers that torch reads from tensors stay tensors."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

COMPARED: dict[str, Callable[[Any, Any], bool]] = {"ne": operator.ne, "gt": operator.gt}
IN_PLACE = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"}


class Stepping(TorchFunctionMode):
    """Runs a step without turning derivatives off, and without reading values.

    Args:
        numbers: state that torch's step reads with `.item()` outside of a graph, such as the count
            of steps. Ops read them in float64, and write them in their own dtype, as Python does.
        is_torchs: whether torch wrote the step. Then `.item()` of a tensor is that tensor, in
            float64, and whether an option is zero follows from the constructor.
        replaced: the constructor's value of each option that is a tensor now, by id.
    """

    def __init__(
        self, numbers: Sequence[torch.Tensor], is_torchs: bool, replaced: Mapping[int, Any]
    ) -> None:
        super().__init__()
        self.numbers = {id(x): x for x in numbers}
        self.is_torchs = is_torchs
        self.replaced = replaced if is_torchs else {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        plain = name.strip("_")
        kwargs = dict(kwargs or {})
        if plain == "set_grad_enabled":
            return None  # a step has derivatives, as all functions do
        if plain == "detach":
            x = args[0]
            return x.view_as(x)
        if plain == "item" and self.is_torchs:
            x = self.read(args[0])
            return x.double()
        if plain in COMPARED and self.is_with_zero(args):
            first = self.replaced[id(args[0])]
            return COMPARED[plain](first, 0)
        if writes(name):
            args = self.written(args)
        else:
            args = tuple(map(self.read, args))
        if plain in SCALARS:
            return SCALARS[plain](func, *args, **kwargs)
        return func(*args, **kwargs)

    def is_with_zero(self, args: tuple[Any, ...]) -> bool:
        """Whether an option is compared with zero."""
        x, other = args
        return id(x) in self.replaced and other == 0

    def read(self, x: Any) -> Any:
        """An input of an op: a number in float64."""
        if id(x) in self.numbers:
            return x.double()
        return x

    def written(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs of an op that writes to the first: others take the dtype of a number."""
        first, *others = args
        if id(first) not in self.numbers:
            return first, *map(self.read, others)
        alike = [_as_dtype(x, first.dtype) for x in others]
        return first, *alike


def writes(name: str) -> bool:
    """Whether a function of this name writes to its first argument."""
    if name in IN_PLACE:
        return True
    return name.endswith("_") and not name.endswith("__")


def _as_dtype(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, torch.Tensor):
        return x.to(dtype)
    return x


def _put(func: Any, x: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The result of a function, which it may write to its first argument."""
    if writes(func.__name__):
        return x.copy_(new)
    return new


def _plus(func: Any, x: Any, y: Any, *, alpha: Any = 1, **more: Any) -> Any:
    """`add` or `sub` whose alpha may be a tensor."""
    if isinstance(alpha, torch.Tensor):
        added = y * alpha
        return func(x, added.to(y.dtype), **more)
    if alpha != 1:
        more["alpha"] = alpha
    return func(x, y, **more)


def _plus_product(combined: Callable[..., Any]) -> Callable[..., Any]:
    """`addcmul` or `addcdiv` by its formula, whose value may be a tensor."""

    def run(func: Any, x: Any, a: Any, b: Any, *, value: Any = 1) -> Any:
        is_one = not isinstance(value, torch.Tensor) and value == 1
        scaled = a if is_one else a * value
        added = combined(scaled, b)
        new = x + added.to(x.dtype)
        return _put(func, x, new)

    return run


def _between(func: Any, x: Any, end: Any, weight: Any) -> Any:
    """`lerp`: by its formula, which its decomposition hides among branches; or with a tensor of
    the same dtype as its weight.
    """
    if isinstance(weight, torch.Tensor):
        return func(x, end, weight.to(x.dtype))
    way = end - x
    if weight < 0.5:
        return _put(func, x, x + weight * way)
    return _put(func, x, end - way * (1 - weight))


def _power(func: Any, x: Any, base: Any) -> Any:
    """A number to the power of a tensor. On CPU Inductor computes a `pow` again for each element
    that it is broadcast to, and an `exp` once (torch 2.13).
    """
    is_number = isinstance(base, (int, float))
    if not is_number or base <= 0 or x.dtype != torch.float64:
        return func(x, base)
    exponent = x * math.log(base)
    return exponent.exp()


def _filled(func: Any, x: Any, fill_value: Any, **more: Any) -> Any:
    """`full_like` whose value may be a tensor."""
    if not isinstance(fill_value, torch.Tensor):
        return func(x, fill_value, **more)
    ones = torch.ones_like(x, **more)
    return ones * fill_value.to(ones.dtype)


# Ops that take a number where a step may have a tensor.
SCALARS: dict[str, Callable[..., Any]] = {
    "add": _plus,
    "sub": _plus,
    "addcmul": _plus_product(torch.mul),
    "addcdiv": _plus_product(torch.div),
    "lerp": _between,
    "full_like": _filled,
    "rpow": _power,
}
