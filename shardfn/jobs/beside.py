"""The watch of a world: started when its ranks make a mesh or call, ended with the process."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from .. import _compat
from ..errors import DivergenceError, RankLostError, source_at
from .calls import CHECKPOINT, Event
from .watch import Watch

UNLIMITED = 1800.0  # seconds, of a backend without a timeout
NAMED = (RankLostError, DivergenceError)
STAY = 1.0  # seconds at exit in which the others may have made as many calls
SERVE = 2.0  # seconds more of the process that serves the store
LAST = 1.0  # seconds for a thread to end
_watches: weakref.WeakKeyDictionary[Any, Watch] = weakref.WeakKeyDictionary()
_connections: set[tuple[int, int]] = set()  # of the process groups
_door = threading.Lock()


@contextmanager
def connections_noted() -> Iterator[None]:
    """A context in which process groups connect."""
    opened = set[tuple[int, int]]()
    try:
        with _compat.sockets_noted(opened):
            yield
    finally:
        _connections.update(opened)


def watch_of(world: Any) -> Watch:
    """The watch of a world of several processes. The first use starts it."""
    watch = _watches.get(world)
    return watch if watch is not None else _started(world)


def _started(world: Any) -> Watch:
    with _door:
        if world not in _watches:
            timeout = _compat.timeout_of(dist.group.WORLD) or UNLIMITED
            store = _compat.world_store()
            _watches[world] = Watch(store, world.rank, world.size, timeout, _connections)
            atexit.register(_end, _watches[world])
        return _watches[world]


@contextmanager
def checkpointing(world: Any, where: str, *, is_background: bool = False) -> Iterator[None]:
    """A context in which all processes of a world write or read a checkpoint.

    Args:
        world: the world.
        where: the function, which errors name.
        is_background: whether calls go on meanwhile.

    Raises:
        RankLostError: a rank does not answer.
        DivergenceError: a rank is in another call.
    """
    if world.kind != "real" or world.size == 1:
        yield
        return
    watch = watch_of(world)
    if not is_background:
        watch.enter(Event(watch.everyone, CHECKPOINT, where, {}))
    try:
        yield
    except Exception as error:
        reason = watch.why(where, error)
        if reason is not None:
            raise reason from error
        if not is_background:
            watch.has_raised(watch.everyone, where, error)
        raise
    if not is_background:
        watch.enter(None)


def _end(watch: Watch) -> None:
    """Tell the others how this process ends, and compare its calls with theirs."""
    error = getattr(sys, "last_value", None)
    follows = watch.is_raised and isinstance(error, NAMED)
    watch.leave(error and _first_line(error), follows=follows)
    serves = watch.rank == 0 and not os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    deadline = time.monotonic() + STAY + SERVE * serves
    knows = lambda: watch.verdict is not None and not serves
    is_done = lambda: knows() or watch.is_alone(serves=serves)
    with watch.told:
        watch.told.wait_for(is_done, max(deadline - time.monotonic(), 0))
    watch.is_over = True
    watch.woken.set()
    for thread in watch.threads:
        thread.join(LAST)
    if watch.verdict is not None and not watch.is_raised and error is None:
        _say(watch)
        _exit(1)
    if any(thread.is_alive() for thread in watch.threads):
        _exit(int(error is not None))  # Python's end would abort the process


def _first_line(error: BaseException) -> str:
    """An error in one line, with the place that raised it."""
    text = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f", at {source_at(x.filename, x.lineno)}" for x in last)
    return f"{text[:200]}{where}"


def _say(watch: Watch) -> None:
    """Print that this process has computed with others that made other calls."""
    error = watch.error("at exit")
    sys.excepthook(type(error), error, None)


def _exit(code: int) -> None:
    """End this process with a code, after what else is to be done at its end."""
    atexit.unregister(_end)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
