"""A reading that stores constants is done again, and keeps them only if it is pure then."""

from __future__ import annotations

import pytest

from shardfn import _compat
from shardfn.capture.closure.memoized import memoized


class Stored(Exception):
    """An error of a reading that would store something."""


@pytest.fixture(name="log")
def _log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a memo is asked to do."""
    log: list[str] = []

    class Memo:
        def write(self, error: Exception) -> bool:
            log.append("write")
            return isinstance(error, Stored)

        def undo(self) -> None:
            log.append("undo")

    monkeypatch.setattr(_compat, "Memo", Memo)
    return log


def reading(log: list[str], *outcomes: BaseException | str):
    left = list(outcomes)

    def read(memo: object) -> str:
        log.append("read")
        outcome = left.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return read


def test_a_pure_function_is_read_once(log: list[str]) -> None:
    assert memoized(reading(log, "graph")) == "graph"
    assert log == ["read"]


def test_a_lazy_default_is_stored_and_the_function_read_again(log: list[str]) -> None:
    assert memoized(reading(log, Stored(), "graph")) == "graph"
    assert log == ["read", "write", "read"]


def test_a_function_that_stores_again_is_refused_and_nothing_stays(log: list[str]) -> None:
    with pytest.raises(Stored):
        memoized(reading(log, Stored(), Stored()))
    assert log == ["read", "write", "read", "undo"]


def test_any_other_error_passes_and_nothing_is_stored(log: list[str]) -> None:
    with pytest.raises(ZeroDivisionError):
        memoized(reading(log, ZeroDivisionError()))
    assert log == ["read", "write"]


def test_an_interrupt_of_the_second_reading_undoes_too(log: list[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        memoized(reading(log, Stored(), KeyboardInterrupt()))
    assert log[-1] == "undo"
