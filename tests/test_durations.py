"""Durations as text."""

from __future__ import annotations

import pytest

from shardfn.durations import human_seconds

FACTORS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@pytest.mark.parametrize("power", range(-40, 14))
@pytest.mark.parametrize("first", [1.0, 3.2, 9.996])
def test_text_is_the_duration_to_three_digits_and_never_a_rounded_zero(
    first: float, power: int
) -> None:
    seconds = first * 10 ** (power / 4)
    number, unit = human_seconds(seconds).split()
    assert float(number) * FACTORS[unit] == pytest.approx(seconds, rel=5e-3)
    assert len(number.replace(".", "").lstrip("0")) >= 1
    assert "e" not in number and (unit == "s" or float(number) < 1000)


def test_the_units() -> None:
    texts = [human_seconds(x) for x in (0, 1e-15, 3.2e-6, 0.9997e-3, 0.15e-3, 1.25e-3, 1, 90)]
    assert texts == [
        "0 us", "0 us", "3.2 us", "1.000 ms", "150 us", "1.250 ms", "1.000 s", "90.000 s",
    ]  # fmt: skip
