"""torch._foreach ops as one op for each tensor: each then has a placement of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ... import _compat
from .reductions import narrow, wide

aten = torch.ops.aten
# ops whose function of one tensor has the same name and arguments
ALIKE = (
    "abs",
    "acos",
    "add",
    "asin",
    "atan",
    "ceil",
    "clone",
    "cos",
    "cosh",
    "div",
    "erf",
    "erfc",
    "exp",
    "expm1",
    "floor",
    "frac",
    "lerp",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "mm",
    "mul",
    "neg",
    "pow",
    "reciprocal",
    "round",
    "rsqrt",
    "sigmoid",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "sub",
    "tan",
    "tanh",
    "trunc",
)


def _norm(x: torch.Tensor, ord: float = 2, dtype: Any = None) -> torch.Tensor:
    return aten.linalg_vector_norm.default(x, ord, dtype=dtype)


def _with_value(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.addcmul or torch.addcdiv, whose value may be positional."""
    return lambda x, a, b, value=1: fn(x, a, b, value=value)


def _copy(x: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return aten.copy.default(x, source)


def _bounded(side: str, of_tensors: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.minimum or torch.maximum with a tensor or a number, by the argument of torch.clamp."""

    def bounded(x: torch.Tensor, other: Any) -> torch.Tensor:
        is_tensor = isinstance(other, torch.Tensor)
        return of_tensors(x, other) if is_tensor else torch.clamp(x, **{side: other})

    return bounded


SMALLER, LARGER = _bounded("max", torch.minimum), _bounded("min", torch.maximum)
# ops whose function of one tensor has another name or other arguments
OF_ONE: dict[str, Callable[..., torch.Tensor]] = {
    "norm": _norm,
    "addcmul": _with_value(torch.addcmul),
    "addcdiv": _with_value(torch.addcdiv),
    "copy": _copy,
    "zero": torch.zeros_like,
    "max": torch.amax,
    "minimum": SMALLER,
    "maximum": LARGER,
    "clamp_max": SMALLER,
    "clamp_min": LARGER,
}


def applied_to_each(op: Any, fn: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """An op on lists of tensors as one call of a function for each element.

    Args:
        op: an overload of a _foreach op.
        fn: of one element of each list; the other arguments stay as they are.
    """
    arguments = _compat.schema(op).arguments
    kinds = [str(argument.type) for argument in arguments]
    is_list = [kind.startswith("List") for kind in kinds]

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        rows = list(zip(args, is_list, strict=False))
        count = next(len(x) for x, is_one in rows if is_one)
        columns = [x if is_one else [x] * count for x, is_one in rows]
        return [fn(*row, **kwargs) for row in zip(*columns, strict=True)]

    return decomposed


def unscaled(
    grads: list[torch.Tensor], found_inf: torch.Tensor, inverse: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """torch._amp_foreach_non_finite_check_and_unscale: gradients times an inverse scale, and 1 if
    any element is not finite.
    """
    results = []
    for x in grads:
        is_finite = torch.isfinite(x)
        is_bad = torch.logical_not(is_finite).any()
        found_inf = torch.maximum(found_inf, is_bad.to(found_inf.dtype))
        size, dtype = wide(x)
        results.append(narrow(size * inverse, dtype))
    return results, found_inf


@functools.cache
def table() -> dict[Any, Callable[..., Any]]:
    """The decompositions of torch._foreach ops, by op."""
    found: dict[Any, Callable[..., Any]] = {}
    for name in (*OF_ONE, *ALIKE):
        fn = OF_ONE.get(name) or getattr(torch, name)
        packet = getattr(aten, f"_foreach_{name}", None)
        overloads = [] if packet is None else packet.overloads()
        for overload in overloads:
            if "out" not in overload and not _reads_values(name, overload):
                op = getattr(packet, overload)
                found[op] = applied_to_each(op, fn)
    found[aten._amp_foreach_non_finite_check_and_unscale.default] = unscaled
    return found


def _reads_values(name: str, overload: str) -> bool:
    """Whether an overload takes its numbers from a tensor."""
    return name in ("addcmul", "addcdiv") and overload == "Tensor"
