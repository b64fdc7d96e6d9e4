"""A line on stderr while a program is compiled, if that takes long."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

DELAY = 2.0  # seconds that pass without a word


@contextlib.contextmanager
def progress(name: str, ops: int, *, is_told: bool = True) -> Iterator[None]:
    """A context in which a program is compiled.

    Args:
        name: of the function.
        ops: how many ops the program has.
        is_told: whether this process prints: one of the ranks does.
    """
    start = time.monotonic()
    said: list[str] = []

    def tell() -> None:
        said.append(name)
        _print(f"compiling {name}, {ops} ops")

    timer = threading.Timer(DELAY, tell)
    timer.daemon = True
    if is_told:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if said:
        _print(f"compiled {name} in {time.monotonic() - start:.1f} s")


def _print(text: str) -> None:
    print(f"shardfn: {text}", file=sys.stderr, flush=True)
