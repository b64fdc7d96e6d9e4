"""The call from which on all ranks run compiled code, agreed over the store of the job.

When a rank has compiled, it promises not to start a call beyond a bound, a few calls ahead of its
last one, before it knows the decision. The decision is the call after the largest bound. Each rank
computes it from the same numbers, so no collective is needed, and no call runs on some ranks op by
op and on others compiled. Only threads in the background wait for the store.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

from ... import _compat
from ...errors import DivergenceError
from ...extensions import Job, service
from ..agreement import has_others
from ..arguments import Placed

AHEAD = 8  # calls that a rank may still start before it must know
PAUSE = 0.02  # seconds between two looks into the store
LOOK = 0.2  # seconds between two looks at the watchdog
PATIENCE = 600.0  # seconds for which a call waits for the other ranks
_numbers = itertools.count()  # of the switches of all ranks together


class Switch:
    """The number of the calls that were started, and of the first that is to run compiled code.

    Args:
        name: of the function, for errors.
        store: of the job; None without other ranks.
        rank: of this process.
        size: the number of processes.
        number: of this switch, equal on all ranks.
        raise_lost: takes the name, and raises if a rank is known to be lost.
    """

    def __init__(
        self,
        name: str,
        store: Any = None,
        rank: int = 0,
        size: int = 1,
        number: int = 0,
        raise_lost: Callable[[str], None] | None = None,
    ) -> None:
        self.name, self.store, self.rank, self.size = name, store, rank, size
        self.key, self.raise_lost = f"shardfn/switch/{number}", raise_lost
        self.calls = 0
        self.bound: int | None = None
        self.first: int | None = None  # the call from which on compiled code runs
        self._lock = threading.Lock()
        self._decided = threading.Event()

    def is_compiled(self) -> bool:
        """Return whether the call that starts now runs compiled code.

        Raises:
            DivergenceError: another rank does not say when it will.
            RankLostError: a rank is lost that would have to.
        """
        with self._lock:
            call = self.calls
            self.calls += 1
            waits = self.first is None and self.bound is not None and call > self.bound
        if waits:
            self._wait()
        return self.first is not None and call >= self.first

    def _wait(self) -> None:
        """Wait until every rank has published the call from which it is ready."""
        deadline = time.monotonic() + PATIENCE
        while not self._decided.wait(LOOK):
            if self.raise_lost is not None:
                self.raise_lost(self.name)
            if time.monotonic() > deadline:
                got = "a rank has not announced the call at which it switches to compiled code"
                fix = "check that all ranks still run, or leave out warmup="
                raise DivergenceError.of(self.name, got, fix=fix)

    def compiled(self) -> None:
        """Agree with the other ranks, once this one has compiled. Runs in the background."""
        if self.store is None:
            self._decide(0)
            return
        self.store.add(f"{self.key}/ready", 1)
        while self.store.add(f"{self.key}/ready", 0) < self.size:
            _pause()
        with self._lock:
            self.bound = self.calls - 1 + AHEAD
        self.store.set(f"{self.key}/{self.rank}", str(self.bound))
        keys = [f"{self.key}/{rank}" for rank in range(self.size)]
        while not self.store.check(keys):
            _pause()
        self._decide(max(int(self.store.get(key)) for key in keys) + 1)

    def _decide(self, first: int) -> None:
        with self._lock:
            self.first = first
        self._decided.set()


def _pause() -> None:
    """Yield the processor for a moment between two looks at the store.

    Raises:
        SystemExit: the process ends, and no call will ask.
    """
    if not threading.main_thread().is_alive():
        raise SystemExit
    time.sleep(PAUSE)


def switch_of(name: str, placed: Placed) -> Switch | None:
    """Build the Switch of a program; None where ranks cannot agree because not all run it."""
    if has_others(placed):
        world, store = placed.world, _compat.world_store()
        place = world.rank, world.size, next(_numbers)
        job = service(Job)
        raise_lost = None if job is None else functools.partial(job.raise_lost, world)
        return Switch(name, store, *place, raise_lost)
    is_alone = placed.mesh is None or placed.mesh.size() == 1
    return Switch(name) if is_alone else None
