"""Exact dtypes of values that Inductor derives from an element's index, such as `arange`.

It computes with their formulas, as integers without bounds, and drops casts of them: as
`(arange(3) - 1).to(torch.uint8)` it has -1 where torch has 255. Here only int64, which formulas
have no need to cast, stays a formula.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# what Inductor counts elements in; a place lies within both
EXACT = (torch.int64, torch.int32)


def exact_propagation(
    original: Callable[..., Any], handler: Any, name: str, args: Any, kwargs: Any
) -> Any:
    """Patch Inductor's index propagation: keep an op as a symbolic formula only where int64
    arithmetic is exact, and else emit it as code.

    Args:
        original: of torch.
        handler: Inductor's, of one kernel.
        name: of the operation.
        args: its arguments: formulas, and constants such as a dtype.
        kwargs: likewise.
    """
    values = [x.value for x in (*args, *kwargs.values()) if hasattr(x, "is_symbolic")]
    formulas = [x for x in values if not x.is_constant()]
    if any(x.dtype not in EXACT for x in formulas) or _has_no_number(values):
        return handler.fallback(name, args, kwargs)
    result = original(handler, name, args, kwargs)
    if not result.is_symbolic or result.value.is_constant():
        return result
    dtype = result.value.dtype
    if dtype is torch.int64 or (not values and dtype in EXACT):
        return result
    if values:
        return handler.fallback(name, args, kwargs)
    wide = original(handler, name, (args[0], torch.int64), {})
    return handler.fallback("to_dtype", (wide, dtype), {"src_dtype": torch.int64})


def _has_no_number(values: list[Any]) -> bool:
    """Check whether any constant among Inductor's values is nan, which sympy cannot order (torch
    2.13).
    """
    constants = [x.expr for x in values if x.is_constant()]
    return any(str(x) == "nan" for x in constants)
