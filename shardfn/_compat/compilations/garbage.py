"""Python's garbage collector, which rests while programs are captured, placed and compiled."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

LEAST = 100_000  # young objects; garbage among fewer is found soon, and with it what it holds
MOST = 2_000_000  # objects that are made before garbage among them is collected
_made = [0]  # objects that pauses have made since


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """Pause garbage collection. Capture and compilation make many long-lived objects, and
    collecting among them takes an eighth of the time or more.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            grow_up()
            gc.enable()


def grow_up() -> None:
    """Move all objects to the oldest garbage-collection generation, so that the next young
    collection does not scan them.
    """
    young, *_ = gc.get_count()
    if young < LEAST or gc.get_freeze_count():
        return  # objects that the user has frozen must stay so
    _made[0] += young
    if _made[0] > MOST:
        _made[0] = 0
        gc.collect()
    gc.freeze()
    gc.unfreeze()
