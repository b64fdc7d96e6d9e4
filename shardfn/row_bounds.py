"""Limits on the number of rows that a rank can receive from other ranks."""

from __future__ import annotations

import fractions
import re
from typing import Any

MULTIPLE = re.compile(r"\d+(\.\d+)?x")  # "1.5x": of the mean


def row_bound(bound: Any, mean: int) -> int:
    """Return a bound as a number of rows: of a number, or of a text such as "1.5x".

    Args:
        bound: as the user wrote it.
        mean: the rows that each rank gets if all get as many.

    Returns:
        At least 1; 0 if it is no bound.

    Example:
        >>> row_bound("1.5x", 5), row_bound(64, 5), row_bound("many", 5)
        (8, 64, 0)
    """
    if isinstance(bound, str) and MULTIPLE.fullmatch(bound):
        return -int(-fractions.Fraction(bound[:-1]) * mean // 1)
    if isinstance(bound, bool) or not isinstance(bound, int):
        return 0
    return max(bound, 0)
