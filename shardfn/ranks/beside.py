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
from ..errors import DivergenceError, RankLostError
from .watch import Watch

UNLIMITED = 1800.0  # seconds, of a backend without a timeout
STAY = 1.0  # seconds at exit in which the others may have made as many calls
SERVE = 2.0  # seconds more of the process that serves the store
_watches: weakref.WeakKeyDictionary[Any, Watch] = weakref.WeakKeyDictionary()
_connections: set[tuple[int, int]] = set()  # of the process groups
_door = threading.Lock()


@contextmanager
def connections_noted() -> Iterator[None]:
    """A context in which process groups connect."""
    with _compat.sockets_noted(_connections):
        yield


def watch_of(world: Any) -> Watch:
    """The watch of a world of several processes. The first use starts it."""
    watch = _watches.get(world)
    return watch if watch is not None else _started(world)


def _started(world: Any) -> Watch:
    with _door:
        if world not in _watches:
            timeout = _compat.timeout_of(dist.group.WORLD) or UNLIMITED
            store = _compat.world_store()
            _watches[world] = Watch(
                store, world.rank, world.size, timeout, _connections
            )
            atexit.register(_end, _watches[world])
        return _watches[world]


def _end(watch: Watch) -> None:
    """Tell the others how this process ends, and compare its calls with theirs."""
    error = getattr(sys, "last_value", None)
    known = watch.verdict is not None
    follows = isinstance(error, (RankLostError, DivergenceError)) and known
    watch.leave(error and _first_line(error), follows=follows)
    serves = watch.rank == 0 and not os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    deadline = time.monotonic() + STAY + SERVE * serves
    is_done = lambda: watch.verdict is not None or watch.is_alone(serves=serves)
    with watch.told:
        watch.told.wait_for(is_done, max(deadline - time.monotonic(), 0))
    watch.is_over = True
    watch.woken.set()
    if watch.verdict is not None and not known and error is None:
        _fail(watch)


def _first_line(error: BaseException) -> str:
    """An error in one line, with the place that raised it."""
    text = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f", at {x.filename}:{x.lineno}" for x in last)
    return f"{text[:200]}{where}"


def _fail(watch: Watch) -> None:
    """End a process that has computed with others that made other calls: not in peace."""
    assert watch.verdict is not None
    error = watch.verdict.error("at exit", None)
    sys.excepthook(type(error), error, None)
    atexit.unregister(_end)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
