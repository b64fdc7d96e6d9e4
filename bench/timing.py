"""Steps timed in turn: the median processor time of each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from shardfn.runtime import cache


def times(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median seconds of processor time of each step, all of them in turn: other work on the
    machine adds nothing to it.
    """
    taken: dict[str, list[float]] = {name: [] for name in steps}
    before = dict(cache.counts)
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.process_time()
            step()
            taken[name].append(time.process_time() - start)
    assert dict(cache.counts) == before, "something was captured or compiled while the clock ran"
    return {name: statistics.median(t) for name, t in taken.items()}
