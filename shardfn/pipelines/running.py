"""The start and end times of the actions of a pipeline schedule."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..errors import ScheduleError
from .actions import Action

Table = Sequence[Sequence[Action]]


class Span(NamedTuple):
    """The start and the end of an action."""

    start: float
    end: float


def spans_of(table: Table, cost: Callable[[Action], float]) -> list[list[Span]]:
    """Return when each action starts and ends, if each starts as soon as it can.

    Args:
        table: the actions of each coordinate, in order.
        cost: the time that an action takes.

    Returns:
        A span for each action of the table.

    Raises:
        ScheduleError: an action that waits forever.
    """
    stages = 1 + max(action.stage for row in table for action in row)
    results: dict[Action, float] = {}  # when each is there
    waiting: dict[Action, list[int]] = {}  # a result, and the coordinates that wait for it
    spans: list[list[Span]] = [[] for _ in table]
    runnable = deque(range(len(table)))
    while runnable:
        c = runnable.popleft()
        for action in table[c][len(spans[c]) :]:
            needs = action.needs(stages)
            missing = next((need for need in needs if need not in results), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(c)
                break
            before = spans[c][-1].end if spans[c] else 0.0
            start = max([before, *(results[need] for need in needs)])
            end = start + cost(action)
            spans[c].append(Span(start, end))
            for result in action.results:
                results.setdefault(result, end)
                runnable.extend(waiting.pop(result, ()))
    for c, row in enumerate(table):
        if len(spans[c]) < len(row):
            raise _stuck(c, row[len(spans[c])])
    return spans


def _stuck(coordinate: int, action: Action) -> ScheduleError:
    return ScheduleError.of(
        "Schedule",
        f"pipeline rank {coordinate} waits forever before {action}",
        needed="a schedule without a deadlock",
        fix="schedule.check(), which gives the reason",
    )
