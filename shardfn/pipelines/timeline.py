"""The timeline of a schedule, given what its actions and messages cost."""

from __future__ import annotations

from collections.abc import Mapping

from .actions import Action
from .running import Span, spans_of
from .schedule import Schedule


def timeline(
    schedule: Schedule, costs: Mapping[tuple[str, int], float], *, delay: float = 0.0
) -> list[list[Span]]:
    """Return when each action of a schedule starts and ends, if each starts as soon as it can.

    A message waits for no room: any number of them may be on the way.

    Args:
        schedule: a schedule that passes `check`.
        costs: the time of each (kind, stage). BW takes that of B and W unless it has its own.
        delay: the time that a message takes from one coordinate to another.

    Returns:
        A span (start, end) for each action of `schedule.table`.

    Raises:
        ScheduleError: an action that waits forever.

    Example:
        >>> schedule = Schedule("one", [[("F", 0, 0), ("BW", 0, 0)]])
        >>> timeline(schedule, {("F", 0): 1.0, ("BW", 0): 2.0})
        [[Span(start=0.0, end=1.0), Span(start=1.0, end=3.0)]]
    """

    def cost(action: Action) -> float:
        kind, stage, _ = action
        if kind == "BW" and (kind, stage) not in costs:
            return costs["B", stage] + costs["W", stage]
        return costs[kind, stage]

    return spans_of(schedule.table, cost, delay=delay)
