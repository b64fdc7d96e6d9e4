"""What Inductor leaves out of a program though it changes values: casts to 16 bits that are cast
back, and sums with zeros, which turn -0.0 to 0.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

HALVES = (torch.float16, torch.bfloat16)


def rounding(
    original: Callable[..., Any],
    x: Any,
    dtype: torch.dtype,
    copy: bool = False,
    use_compute_types: bool = True,
) -> Any:
    """Patch Inductor's casts: code of Triton rounds where the program casts to 16 bits. Code of C++
    rounds once it forgets what it has cast.

    Args:
        original: of torch.
        x: Inductor's value.
        dtype: of the result.
        copy: whether it is a cast of the program, and not one of Inductor's own.
        use_compute_types: whether values of 16 bits are held in 32.
    """
    return original(x, dtype, copy, use_compute_types and not (copy and dtype in HALVES))


def unrounded_forgotten(_: Callable[..., Any], *args: Any) -> None:
    """Patch how a kernel of C++ remembers a value that it has cast to 16 bits, to take it where the
    result is cast back: it casts back.
    """


def sums_kept(_: Callable[..., Any], *args: Any) -> None:
    """Patch how Inductor takes out sums with zeros, and products with ones: they stay."""
