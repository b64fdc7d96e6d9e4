"""Windows of a sequence that occur more than once: they are equal, apart, and save what repeats."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfn.compile.repeats.windows import Span, Windows, repeated


def found_in(sequence: Sequence[int], least: int = 6) -> list[Windows]:
    """All windows that are offered, if each is taken whole."""
    found: list[Windows] = []

    def take(windows: Windows) -> list[Span]:
        found.append(windows)
        return [(start, start + windows.length) for start in windows.starts]

    repeated(sequence, least, take)
    return found


def test_a_block_eighty_times_is_one_window_with_all_copies() -> None:
    block = list(range(10, 57))
    (windows,) = found_in([1, 2, 3, *block * 80, 4, 5])
    assert windows.starts == tuple(range(3, 3 + 80 * 47, 47))
    assert windows.length == 47


def test_copies_with_others_between_them_are_found() -> None:
    block = list(range(10, 30))
    sequence = [*block, 1, *block, 2, 3, *block, -1, *block]
    (windows,) = found_in(sequence)
    assert windows.starts == (0, 21, 43, 64)
    assert windows.length == 20


def test_a_copy_that_differs_at_its_end_is_left_out_where_the_others_save_more() -> None:
    block = list(range(10, 40))
    sequence = [*block, *block, *block, *block[:15], 7, *block[16:]]
    first, *_ = found_in(sequence)
    assert first.starts == (0, 30, 60)
    assert first.length == 30


def test_kinds_in_any_order_are_found_one_by_one() -> None:
    kinds = [list(range(n, n + 12)) for n in (100, 200, 300)]
    order = [0, 1, 1, 2, 0, 2, 1, 0, 2, 2, 1, 0, 0]
    found = found_in([x for k in order for x in kinds[k]])
    assert sum(windows.saving for windows in found) >= (len(order) - 5) * 12


@pytest.mark.parametrize("sequence", [[], [1], [-1] * 40, list(range(40)), [5] * 3])
def test_a_sequence_without_repeats_gives_nothing(sequence: list[int]) -> None:
    assert found_in(sequence) == []


@given(st.lists(st.integers(-1, 3), max_size=120), st.integers(1, 12))
def test_windows_are_equal_and_apart_and_without_negative_elements(
    sequence: list[int], least: int
) -> None:
    used: set[int] = set()
    for windows in found_in(sequence, least):
        assert windows.saving >= least
        texts = {tuple(sequence[start : start + windows.length]) for start in windows.starts}
        assert len(texts) == 1
        assert min(*texts.pop(), 0) == 0
        for start in windows.starts:
            span = set(range(start, start + windows.length))
            assert not span & used
            used |= span


@given(st.lists(st.integers(0, 5), min_size=8, max_size=20), st.integers(2, 6))
def test_repeats_of_any_block_save_all_but_a_copy(block: list[int], copies: int) -> None:
    apart = [x for k in range(copies) for x in (*block, -1 - k)]
    saved = sum(windows.saving for windows in found_in(apart))
    assert saved >= (copies - 1) * len(block)
