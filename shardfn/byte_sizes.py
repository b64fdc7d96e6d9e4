"""Byte sizes as text (`25MB`, `1.5 KiB`) and as numbers, and checks of bucket caps."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from .errors import ShardError

THOUSANDS = {f"{k}B": 1000**i for i, k in enumerate("KMGT", 1)}
BINARY = {f"{k}iB": 1024**i for i, k in enumerate("KMGT", 1)}
UNITS = {"": 1, "B": 1, **THOUSANDS, **BINARY}
DEFAULT_FIRST = 2**20  # as torch's DistributedDataParallel has it
CAP_NAMES = ("cap", "first_cap", "max_in_flight")
SIZE_FIX = "a positive int, or text such as '512KB', '25MB' or '1GiB'"
SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def bytes_of(size: int | str) -> int:
    """Parse a number of bytes, given as a number or as text.

    Args:
        size: bytes, or text such as "512KB" (thousands) or "1GiB" (1024s).

    Returns:
        Bytes.

    Raises:
        ValueError: no positive number of bytes.

    Example:
        >>> bytes_of("25MB"), bytes_of("1GiB"), bytes_of(7)
        (25000000, 1073741824, 7)
    """
    if isinstance(size, int) and not isinstance(size, bool):
        n = size
    else:
        match = SIZE.fullmatch(size) if isinstance(size, str) else None
        if match is None or match[2] not in UNITS:
            raise ValueError(f"{size!r} is not a number of bytes")
        n = int(Fraction(match[1]) * UNITS[match[2]])
    if n <= 0:
        raise ValueError(f"{size!r} is not positive")
    return n


def check_caps(name: str, caps: tuple[Any, Any, Any]) -> tuple[int, int, int]:
    """Check cap, first cap and bytes in flight, and return them as numbers."""
    sizes: list[int] = []
    for option, size in zip(CAP_NAMES, caps, strict=True):
        try:
            if option == "first_cap" and size is None:
                sizes.append(min(DEFAULT_FIRST, sizes[0]))
            else:
                sizes.append(bytes_of(size))
        except ValueError as error:
            raise ShardError.of(f"{name}, {option}", str(error), fix=SIZE_FIX) from None
    if sizes[1] > sizes[0]:
        fix = "make first_cap at most cap, so that the first bucket closes early"
        got = f"first_cap {caps[1]!r} is above cap {caps[0]!r}"
        raise ShardError.of(f"{name}, first_cap", got, fix=fix)
    return sizes[0], sizes[1], sizes[2]


def human_bytes(n: float) -> str:
    """Format a number of bytes for people.

    Example:
        >>> human_bytes(1536)
        '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(n, 1) < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError
