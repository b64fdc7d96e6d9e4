"""A step of an optimizer as a graph: numbers that torch reads from tensors stay tensors."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch
from torch.overrides import TorchFunctionMode

from ...errors import TreeError
from .recipe import Options, Recipe

COMPARED: dict[str, Callable[[Any, Any], bool]] = {"ne": operator.ne, "gt": operator.gt}
# classes whose steps take roots of negative numbers in their first steps, and drop them
DROPPED_ROOTS = (torch.optim.RAdam,)
IN_PLACE = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"}


class Stepping(TorchFunctionMode):
    """Runs a step without turning derivatives off, and without reading values.

    Args:
        recipe: of the optimizer. If torch wrote the step, `.item()` of a tensor is that tensor, in
            float64, and whether an option is zero follows from the constructor.
        replaced: of each option that is a tensor now, by id: its name and the constructor's value.
        stand_ins: of each number that has a derivative, by the id of its stand-in: the two.
    """

    def __init__(
        self, recipe: Recipe, replaced: Mapping[int, tuple[str, Any]], stand_ins: dict[int, StandIn]
    ) -> None:
        super().__init__()
        self.recipe = recipe
        self.replaced = replaced if recipe.is_torchs else {}
        self.stand_ins = stand_ins
        self.numbers: dict[int, torch.Tensor] = {}

    @classmethod
    def with_options(
        cls, recipe: Recipe, optimizer: torch.optim.Optimizer, options: Options
    ) -> Stepping:
        """Set an optimizer's options, and return the mode of its step."""
        stand_ins: dict[int, StandIn] = {}

        def own(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(map(own, x))
            return number_for(x, stand_ins)

        return cls(recipe, recipe.set_options(optimizer, options, own), stand_ins)

    def reads(self, numbers: Iterable[torch.Tensor]) -> None:
        """State that torch's step reads with `.item()` outside of a graph, such as the count of
        steps. Ops read them in float64, and write them in their own dtype, as Python does.
        """
        self.numbers |= {id(x): x for x in numbers}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        plain = name.strip("_")
        if plain == "set_grad_enabled":
            return None  # a step has derivatives, as all functions do
        if plain in COMPARED and self.is_with_zero(args):
            return COMPARED[plain](self.of_constructor(args[0]), 0)
        args = tuple(map(self.meant, args))
        kwargs = {name: self.meant(x) for name, x in (kwargs or {}).items()}
        return number_for(self.called(func, name, plain, args, kwargs), self.stand_ins)

    def called(
        self, func: Any, name: str, plain: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of an op of a step."""
        if plain == "detach":
            x = args[0]
            return x.view_as(x)
        if plain == "item" and self.recipe.is_torchs:
            x = self.read(args[0])
            return x.double()
        out = kwargs.pop("out", None)
        if out is not None:  # it has no batching rule
            return out.copy_(self.called(func, name, plain, args, kwargs))
        if writes(name):
            args = self.written(args)
        else:
            args = tuple(map(self.read, args))
        if plain == "pow" and self.recipe.cls in DROPPED_ROOTS:
            return _root(func, *args, **kwargs)
        if plain in SCALARS:
            return SCALARS[plain](func, *args, **kwargs)
        return func(*args, **kwargs)

    def is_with_zero(self, args: tuple[Any, ...]) -> bool:
        """Whether an option is compared with zero."""
        x, other = args
        return id(x) in self.replaced and isinstance(other, (int, float)) and other == 0

    def of_constructor(self, x: torch.Tensor) -> Any:
        """The constructor's value of an option that is a tensor now.

        Raises:
            TreeError: it is zero. Then the step has no code for the option, whose value is not
                known before the step runs.
        """
        name, value = self.replaced[id(x)]
        if value == 0:
            raise TreeError.of(
                f"{self.recipe.name}.update, argument {name}",
                f"{name} is a tensor, and {value} in the constructor: a captured step leaves out "
                "what an option of zero does",
                needed="a number; or a constructor in which it is not zero",
                fix=f"sf.optim(torch.optim.{self.recipe.cls.__name__}, {name}=0.1) for any {name}",
            )
        return value

    def meant(self, x: Any) -> Any:
        """The tensor that an input of an op stands for."""
        found = self.stand_ins.get(id(x))
        return x if found is None else found.number

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


@attrs.frozen
class StandIn:
    """A tensor in place of a number that has a derivative: torch's C++ takes no such tensor as a
    number, such as the `alpha` of an addition.
    """

    shown: torch.Tensor
    number: torch.Tensor


def number_for(x: Any, stand_ins: dict[int, StandIn]) -> Any:
    """What a step is given for a value: a stand-in for a number that has a derivative."""
    if not isinstance(x, torch.Tensor) or x.dim() or not x.requires_grad:
        return x
    shown = x.detach()
    stand_ins[id(shown)] = StandIn(shown, x)
    return shown


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


def _root(func: Any, x: Any, exponent: Any) -> Any:
    """A power. That of a negative number to a fraction is dropped later in the step, and its
    derivative would be nan all the same.
    """
    if exponent == 0.5 and isinstance(x, torch.Tensor):
        return func(torch.where(x < 0, torch.ones_like(x), x), exponent)
    return func(x, exponent)


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
