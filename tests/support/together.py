"""Threads that start at once, and what each of them returned or raised."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any


def together(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run each job in a thread of its own, all from the same moment; an error stands for what
    it raised.
    """
    results: list[Any] = [None] * len(jobs)
    start = threading.Barrier(len(jobs))

    def run(i: int) -> None:
        start.wait()
        try:
            results[i] = jobs[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def apart(job: Callable[[], Any]) -> Any:
    """What a job returns in another thread, after it has ended; raises what it raised."""
    (result,) = together([job])
    if isinstance(result, Exception):
        raise result
    return result
