"""Threads that run one at a time, each until it waits for another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

Test = Callable[[], bool]


class Ended(BaseException):
    """Ends the thread of a rank because another rank has failed."""


class Turns:
    """The turns of n threads. The next one is the first after the one that stops which can go on.

    Args:
        n: the threads.
        stuck: makes the error of threads that all wait, from what each waits for.
        enter: called by a thread that begins or goes on.
        leave: called by a thread that stops or ends.
    """

    def __init__(
        self,
        n: int,
        stuck: Callable[[dict[int, str]], BaseException],
        enter: Callable[[int], None],
        leave: Callable[[int], None],
    ) -> None:
        self.n, self.stuck, self.enter, self.leave = n, stuck, enter, leave
        self.waiting: dict[int, tuple[Test, Callable[[], str]]] = {}
        self.ending: set[int] = set()  # told to end, which C++ may report as another error
        self.failed: dict[int, BaseException] = {}
        self.signals = [threading.Semaphore(0) for _ in range(n)]
        self.finished = threading.Event()
        self.threads: dict[int, int] = {}  # of each thread's identifier, its rank

    def rank(self) -> int | None:
        """Return the rank that the calling thread is; None for other threads."""
        return self.threads.get(threading.get_ident())

    def run(self, each: Callable[[int], Any]) -> list[Any]:
        """Run a function of the rank on n threads. Returns the results; errors are in `failed`."""
        results: list[Any] = [None] * self.n

        def run_one(rank: int) -> None:
            self.threads[threading.get_ident()] = rank
            self.signals[rank].acquire()
            try:
                if not self.failed:
                    self.enter(rank)
                    try:
                        results[rank] = each(rank)
                    finally:
                        self.leave(rank)
            except Ended:
                pass
            except BaseException as error:  # each rank's own, raised by the caller of `run`
                if rank not in self.ending:
                    self.failed[rank] = error
            self.waiting.pop(rank, None)
            self.next(rank)

        threads = [
            threading.Thread(target=run_one, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(self.n)
        ]
        for rank, thread in enumerate(threads):
            self.waiting[rank] = (lambda: True), (lambda: "has not begun")
            thread.start()
        self.next(self.n - 1)
        self.finished.wait()
        for thread in threads:
            thread.join()
        return results

    def next(self, rank: int) -> None:
        """Give the turn to the next thread that can go on. All of them end where none can."""
        others = [(rank + 1 + i) % self.n for i in range(self.n)]
        waiting = [r for r in others if r in self.waiting]
        if not waiting:
            self.finished.set()
            return
        ready = waiting if self.failed else [r for r in waiting if self.waiting[r][0]()]
        if not ready:
            texts = {r: self.waiting[r][1]() for r in sorted(waiting)}
            self.failed[min(waiting)] = self.stuck(texts)
            ready = waiting
        del self.waiting[ready[0]]
        self.signals[ready[0]].release()

    def wait(self, until: Test, what: Callable[[], str]) -> None:
        """Let other threads run until a test holds.

        Args:
            until: the test.
            what: says what the thread waits for.
        """
        if not until():
            self._stop(until, what)

    def pause(self) -> None:
        """Let the other threads that can go on run first."""
        self._stop(lambda: True, str)

    def _stop(self, until: Test, what: Callable[[], str]) -> None:
        rank = self.rank()
        assert rank is not None
        self.leave(rank)
        self.waiting[rank] = until, what
        self.next(rank)
        self.signals[rank].acquire()
        self.enter(rank)
        if self.failed:
            self.ending.add(rank)
            raise Ended
