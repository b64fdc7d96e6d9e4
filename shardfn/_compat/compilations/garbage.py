"""Python's garbage collector, which rests while programs are captured, placed and compiled."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import attrs

LEAST = 100_000  # young objects; garbage among fewer is found soon, and with it what it holds
MOST = 2_000_000  # objects that are made before garbage among them is collected


@attrs.define
class Pauses:
    """What pauses of this process have seen.

    Args:
        made: objects made in pauses since garbage was collected.
        has_frozen: the user has frozen objects. It takes long to count them, so it is asked until
            there are some, and not again.
    """

    made: int = 0
    has_frozen: bool = False


_pauses = Pauses()


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
    if young < LEAST:
        return
    _pauses.has_frozen = _pauses.has_frozen or gc.get_freeze_count() > 0
    if _pauses.has_frozen:
        return  # these objects must stay so
    _pauses.made += young
    if _pauses.made > MOST:
        _pauses.made = 0
        gc.collect()
    gc.freeze()
    gc.unfreeze()
