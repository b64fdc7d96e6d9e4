"""Elementary functions in Inductor's C++ with the digits that torch's kernels give.

Compiled code has torch's values to 16 units in the last place of float32 and float64, near zero
and near overflow too. Formulas of Inductor that lose digits there stand in `FORMULAS`, with what
is written in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

VECTORS = "torch._inductor.codegen.cpp:CppVecOverrides"
# the series of erf, whose factor is 2 / sqrt(pi), below 1/2
ERF = (1.1283791670955126, -0.37612638903183754, 0.11283791670955126, -0.026866170645131252,
       0.005223977625442188, -0.0008548327023450852, 0.00012055332981789664)  # fmt: skip


def _by_method(name: str) -> Callable[[Any], str]:
    """The function of torch's vectors."""
    return lambda x: f"{x}.{name}()"


def _one_by_one(name: str) -> Callable[[Any], Any]:
    """The function of the C++ library, for each element of a vector."""

    def written(x: Any) -> Any:
        from torch._inductor.codegen.cpp import CppOverrides, CppVecOverrides

        return CppVecOverrides._scalarize(getattr(CppOverrides, name))(x)

    return written


def _erf(x: Any) -> str:
    """torch's vectors of float32 have it to seven digits after the point: not near zero."""
    if x.dtype is torch.float64:
        return f"{x}.erf()"
    kind = f"decltype({x})"
    series = f"{kind}({ERF[-1]})"
    for factor in reversed(ERF[:-1]):
        series = f"({series} * {x} * {x} + {kind}({factor}))"
    return f"{kind}::blendv({x}.erf(), {x} * {series}, {x}.abs() < {kind}(0.5))"


FORMULAS: dict[str, Callable[[Any], Any]] = {
    "acosh": _one_by_one("acosh"),  # infinite from the root of the largest number on
    "atanh": _one_by_one("atanh"),  # log((1 + x) / (1 - x)) / 2
    "erf": _erf,
    "expm1": _by_method("expm1"),  # exp(x) - 1
}


def written(name: str) -> Callable[..., Any]:
    """What a patch calls to write a function of the table.

    Args:
        name: the function.
    """
    return lambda original, x: FORMULAS[name](x)
