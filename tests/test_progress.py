"""Progress is shown where somebody watches, when something takes long, and leaves nothing."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardfn import progress as progress_module
from shardfn.progress import UNWATCHED, is_watched, progress

ROOT = Path(__file__).parents[1]
PROGRAM = """
import sys, threading, time
from shardfn import progress
progress.DELAY, progress.PERIOD = 0.05, 0.01
with progress.progress("sweep of step") as show:
    show("row 1 of 2")
    with progress.progress("capturing step"):
        time.sleep(0.5)
sys.stderr.write("end\\n")
assert threading.active_count() == 1
"""
SHOWN = {k: v for k, v in os.environ.items() if k not in ("CI", "PYTEST_CURRENT_TEST", "RANK")}
SHOWN = {**SHOWN, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100"}


def on_a_terminal() -> str:
    """What a process writes on a pseudo-terminal as its standard error."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", PROGRAM]
    run = subprocess.Popen(command, stderr=theirs, env=SHOWN, cwd=ROOT)
    os.close(theirs)
    text = b""
    try:
        while part := os.read(ours, 4096):
            text += part
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(ours)
    assert run.wait(60) == 0
    return text.decode().replace("\r\n", "\n")


def test_a_terminal_shows_what_takes_long_and_the_line_goes() -> None:
    text = on_a_terminal()
    assert "\rshardfn: sweep of step: row 1 of 2: capturing step, 0 s" in text
    before, _, last = text.rpartition("\r")
    assert last.strip() == "end"
    assert before.rpartition("\r")[2].strip() == ""  # blanks lie over the line


class Screen(io.StringIO):
    """A terminal of this process."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    for name in ("RANK", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(progress_module, "UNWATCHED", ())
    monkeypatch.setattr(progress_module, "DELAY", 0.0)
    monkeypatch.setattr(progress_module, "PERIOD", 0.001)
    screen = Screen()
    write_to(screen, monkeypatch)
    return screen


def write_to(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a stream the standard error, which pytest's own is otherwise."""
    monkeypatch.setattr(progress_module, "sys", SimpleNamespace(stderr=stream))


def wait_for(screen: Screen, text: str) -> None:
    end = time.monotonic() + 30
    while text not in screen.getvalue() and time.monotonic() < end:
        time.sleep(0.001)
    assert text in screen.getvalue()


def blink() -> None:
    """Show what takes longer than the screen's delay."""
    with progress("sweep of step") as show:
        show("row 1 of 2")
        time.sleep(0.02)


def test_what_is_fast_shows_nothing(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "DELAY", 30.0)
    blink()
    assert screen.getvalue() == ""


@pytest.mark.parametrize(
    ("name", "value"), [("SHARDFN_PROGRESS", "0"), ("RANK", "1"), ("CI", "true"), ("TERM", "dumb")]
)
def test_a_variable_switches_it_off(
    screen: Screen, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    for other in UNWATCHED:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setattr(progress_module, "UNWATCHED", UNWATCHED)
    assert is_watched()
    monkeypatch.setenv(name, value)
    blink()
    assert not is_watched() and screen.getvalue() == ""


def test_a_pipe_shows_nothing(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    write_to(pipe, monkeypatch)
    blink()
    assert pipe.getvalue() == ""


def test_an_error_inside_leaves_no_thread_and_no_line(screen: Screen) -> None:
    before = threading.active_count()
    with pytest.raises(KeyError), progress("compiling step"):
        wait_for(screen, "compiling step")
        raise KeyError
    assert threading.active_count() == before
    assert screen.getvalue().rpartition("\r")[2] == ""
    with progress("again"):
        wait_for(screen, "shardfn: again, 0 s")


def test_another_thread_does_not_write_over_the_line(screen: Screen) -> None:
    def other() -> None:
        with progress("of another thread") as show:
            show("which nobody sees")

    with progress("capturing step"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        wait_for(screen, "capturing step, 0 s")
    assert "another" not in screen.getvalue()


def test_a_terminal_that_is_gone_ends_the_line(screen: Screen) -> None:
    with progress("capturing step"):
        wait_for(screen, "capturing step")
        screen.close()
        time.sleep(0.01)
    assert not is_watched()


def test_a_notebook_is_watched(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_watched()
    kind: Any = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})
    write_to(kind(), monkeypatch)
    assert is_watched()
    write_to(io.StringIO(), monkeypatch)
    assert not is_watched()
