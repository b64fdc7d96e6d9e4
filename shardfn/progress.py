"""The progress line on a terminal or in a notebook, for work that takes longer than two seconds."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

DELAY = 2.0  # seconds that pass without a line
PERIOD = 0.5  # seconds from one line to the next
SWITCH = "SHARDFN_PROGRESS"  # 0: never
# what a process has in its environment where nobody watches
UNWATCHED = ("CI", "PYTEST_CURRENT_TEST")

_own = threading.local()  # the line of a thread
_door = threading.Lock()  # held by the thread that shows a line


@contextlib.contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """Show what a block does, if it takes long and somebody watches. Inside of another block it
    adds to the line of that one. The line goes away at the end.

    Args:
        text: what the block does, such as "compiling step".

    Returns:
        A context, with a function that takes how far the block is, such as "row 3 of 12".
    """
    line = getattr(_own, "line", None)
    if line is not None:
        with line.part(text) as show:
            yield show
        return
    if not is_watched() or not _door.acquire(blocking=False):
        yield show_nothing
        return
    try:
        line = _own.line = _Line(sys.stderr)
        try:
            with line.part(text) as show:
                yield show
        finally:
            _own.line = None
            line.close()
    finally:
        _door.release()


def is_watched() -> bool:
    """Return whether the standard error of this process is a terminal or a notebook: of rank 0,
    outside of tests and of continuous integration, unless SHARDFN_PROGRESS=0.
    """
    if not _is_shown(sys.stderr):
        return False
    known = os.environ
    if known.get(SWITCH) == "0" or known.get("RANK", "0") != "0" or known.get("TERM") == "dumb":
        return False
    return not any(map(known.get, UNWATCHED))


def _is_shown(stream: Any) -> bool:
    """Return whether text of a stream appears in front of a person."""
    if stream is None or stream.closed:
        return False
    return stream.isatty() or type(stream).__module__.startswith("ipykernel.")


def show_nothing(_: str) -> None:
    """Take the text of a block that nobody watches."""


class _Line:
    """The line of a thread, which another thread writes until it is closed.

    Args:
        stream: of the text.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.texts: list[str] = []  # of the blocks, the outermost first
        self.start = time.monotonic()
        self.width = 0  # letters that are on the screen
        self.is_over = threading.Event()
        self.writer = threading.Thread(target=self._write, name="shardfn progress", daemon=True)
        self.writer.start()

    @contextlib.contextmanager
    def part(self, text: str) -> Iterator[Callable[[str], None]]:
        """Add the text of a block to the line."""
        k = len(self.texts)
        self.texts.append(text)
        try:
            yield lambda now: self.texts.__setitem__(k, f"{text}: {now}")
        finally:
            del self.texts[k:]

    def close(self) -> None:
        """Take the line from the screen."""
        self.is_over.set()
        self.writer.join()

    def _write(self) -> None:
        """Write the line again and again, and remove it at the end."""
        wait = DELAY
        while not self.is_over.wait(wait):
            self._put(f"shardfn: {': '.join([*self.texts])}, {self._seconds():.0f} s")
            wait = PERIOD
        if self.width:
            self._put("")
            self._put("")

    def _seconds(self) -> float:
        return time.monotonic() - self.start

    def _put(self, text: str) -> None:
        """Write over what is on the screen. A terminal that is gone ends the line."""
        short = text[: shutil.get_terminal_size().columns - 1]
        try:
            self.stream.write(f"\r{short.ljust(self.width)}")
            self.stream.flush()
        except (OSError, ValueError):
            self.is_over.set()
        self.width = len(short)
