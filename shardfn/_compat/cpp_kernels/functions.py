"""C++ formulas of acosh, atanh, erf and expm1 that give the digits of torch's own kernels.

Compiled code has torch's values to 16 units in the last place of float32 and float64, near zero
and near overflow too. Inductor's formulas of these functions lose digits there.
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
    """Return the formula that calls a method of torch's C++ vector class: `x.expm1()`."""
    return lambda x: f"{x}.{name}()"


def _per_element(name: str) -> Callable[[Any], Any]:
    """Return the formula that applies the scalar C++ function to each element of a vector."""

    def vector_formula(x: Any) -> Any:
        from torch._inductor.codegen.cpp import CppOverrides, CppVecOverrides

        return CppVecOverrides._scalarize(getattr(CppOverrides, name))(x)

    return vector_formula


def _erf(x: Any) -> str:
    """Write erf of a vector: a power series for float32 below 1/2, where torch's vectorised erf
    loses digits, and torch's erf elsewhere.
    """
    if x.dtype is torch.float64:
        return f"{x}.erf()"
    kind = f"decltype({x})"
    series = f"{kind}({ERF[-1]})"
    for factor in reversed(ERF[:-1]):
        series = f"({series} * {x} * {x} + {kind}({factor}))"
    return f"{kind}::blendv({x}.erf(), {x} * {series}, {x}.abs() < {kind}(0.5))"


FORMULAS: dict[str, Callable[[Any], Any]] = {
    "acosh": _per_element("acosh"),  # infinite from the root of the largest number on
    "atanh": _per_element("atanh"),  # log((1 + x) / (1 - x)) / 2
    "erf": _erf,
    "expm1": _by_method("expm1"),  # exp(x) - 1
}


def vector_formula(name: str) -> Callable[..., Any]:
    """Return the patch that has Inductor write the formula of FORMULAS for a function.

    Args:
        name: the function.
    """
    return lambda original, x: FORMULAS[name](x)
