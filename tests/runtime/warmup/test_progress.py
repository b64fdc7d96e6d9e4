"""A long compilation is told on stderr, a short one is not."""

from __future__ import annotations

import threading

import pytest

from shardfn.runtime.warmup import progress


def test_a_short_compilation_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("step", 3):
        pass
    assert capsys.readouterr().err == ""


def test_a_long_compilation_says_what_it_compiles_and_how_long_it_took(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Timer(threading.Timer):
        def __init__(self, _: float, tell: object) -> None:
            super().__init__(0.0, tell)  # type: ignore[arg-type]

        def start(self) -> None:
            super().start()
            self.join()

    monkeypatch.setattr(threading, "Timer", Timer)
    with progress("shard(step)", 3):
        pass
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "shardfn: compiling shard(step), 3 ops"
    assert said[1].startswith("shardfn: compiled shard(step) in 0.")
    with progress("shard(step)", 3, is_told=False):
        pass
    assert capsys.readouterr().err == ""
