"""A step of an optimizer as a graph: numbers that torch reads from tensors stay tensors."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "ne": operator.ne,
    "gt": operator.gt,
}
IN_PLACE = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"}


class Stepping(TorchFunctionMode):
    """Runs a step without turning derivatives off, and without reading values.

    Args:
        numbers: state that torch's step reads with `.item()` outside of a graph, such as the count
            of steps. Ops read them in float64, and write them in their own dtype, as Python does.
        first: the options of the constructor; None for a step that is not torch's. In torch's,
            `.item()` of a tensor is that tensor, in float64, and whether an option is zero
            follows from the constructor.
        options: the options of this step.
    """

    def __init__(
        self,
        numbers: Sequence[torch.Tensor],
        first: Mapping[str, Any] | None,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.numbers = {id(x): x for x in numbers}
        self.is_torchs = first is not None
        known = first or {}
        self.options = {
            id(x): known[name] for name, x in options.items() if name in known
        }

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if (
            name == "_set_grad_enabled"
        ):  # a step has derivatives, as all functions do
            return None
        if name == "detach":
            return args[0].view_as(args[0])
        if name == "item" and self.is_torchs:
            return self.read(args[0]).double()
        compared = COMPARED.get(name.strip("_"))
        if compared and id(args[0]) in self.options and args[1] == 0:
            return compared(self.options[id(args[0])], 0)
        if name in IN_PLACE or (name.endswith("_") and not name.endswith("__")):
            args = self.written(args)
        else:
            args = tuple(map(self.read, args))
        written_out = SCALARS.get(name.strip("_"))
        if written_out is not None:
            return written_out(func, *args, **kwargs)
        return func(*args, **kwargs)

    def read(self, x: Any) -> Any:
        """An input of an op: a number in float64."""
        return x.double() if id(x) in self.numbers else x

    def written(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs of an op that writes to the first: others take the dtype of a number."""
        first, *others = args
        if id(first) not in self.numbers:
            return first, *map(self.read, others)
        return first, *(
            x.to(first.dtype) if isinstance(x, torch.Tensor) else x for x in others
        )


def _plus(func: Any, x: Any, y: Any, *, alpha: Any = 1, **more: Any) -> Any:
    """`add` or `sub` whose alpha is a tensor."""
    if not isinstance(alpha, torch.Tensor):
        return func(x, y, alpha=alpha, **more) if alpha != 1 else func(x, y, **more)
    return func(x, (y * alpha).to(y.dtype), **more)


def _plus_product(combined: Callable[..., Any]) -> Callable[..., Any]:
    """`addcmul` or `addcdiv` by its formula, whose value may be a tensor."""

    def run(
        func: Any, x: Any, a: Any, b: Any, *, value: Any = 1, **more: Any
    ) -> Any:
        is_one = not isinstance(value, torch.Tensor) and value == 1
        added = combined(a if is_one else a * value, b).to(x.dtype)
        return x.add_(added) if func.__name__.endswith("_") else x.add(added)

    return run


def _between(func: Any, x: Any, end: Any, weight: Any, **more: Any) -> Any:
    """`lerp`: by its formula, which its decomposition hides among branches; or with a tensor of
    the same dtype as its weight.
    """
    if isinstance(weight, torch.Tensor):
        return func(x, end, weight.to(x.dtype), **more)
    new = x + weight * (end - x) if weight < 0.5 else end - (end - x) * (1 - weight)
    return x.copy_(new) if func.__name__.endswith("_") else new


def _power(func: Any, x: Any, base: Any) -> Any:
    """A number to the power of a tensor. On CPU Inductor computes a `pow` again for each element
    that it is broadcast to, and an `exp` once (torch 2.13).
    """
    if isinstance(base, torch.Tensor) or base <= 0 or x.dtype != torch.float64:
        return func(x, base)
    return (x * math.log(base)).exp()


def _filled(func: Any, x: Any, value: Any, **more: Any) -> Any:
    """`full_like` whose value is a tensor."""
    if not isinstance(value, torch.Tensor):
        return func(x, value, **more)
    return torch.ones_like(x, **more) * value.to(more.get("dtype") or x.dtype)


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
