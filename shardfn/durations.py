"""Formatting of durations as text, such as `1.250 ms` and `3.2 us`."""

from __future__ import annotations


def human_seconds(seconds: float) -> str:
    """Format a duration in the unit that suits it, down to nanoseconds.

    Args:
        seconds: 0 or more.

    Example:
        >>> [human_seconds(x) for x in (12.5, 0.00125, 3.2e-6, 4e-9, 0)]
        ['12.500 s', '1.250 ms', '3.2 us', '4 ns', '0 us']
    """
    if seconds >= 0.9999995:
        return f"{seconds:.3f} s"
    if seconds >= 0.9995e-3:
        return f"{1e3 * seconds:.3f} ms"
    if seconds >= 0.9995e-6:
        return f"{1e6 * seconds:.3g} us"
    return f"{1e9 * seconds:.3g} ns" if seconds >= 0.5e-12 else "0 us"
