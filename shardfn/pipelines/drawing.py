"""A pipeline schedule as a grid of text, with a row for each rank, and time from left to right."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..errors import ScheduleError
from .actions import Action
from .running import Span, Table, spans_of

SHOWN_SLOTS = 120  # columns of a grid


def grid(table: Table) -> str:
    """Print a row for each coordinate and a column for each unit of time. F, B and W take one unit,
    BW two.

    Example:
        >>> print(grid([[Action("F", 0, 0), Action("BW", 0, 0)]]))
          0 | F0.0  BW0.0 -
    """
    spans, note = unit_spans(table)
    slots = int(max(row[-1].end for row in spans if row))
    width = max(len(str(action)) for row in table for action in row)
    lines = []
    for c, row in enumerate(table):
        cells = ["."] * slots
        for action, (start, end) in zip(row, spans[c], strict=True):
            cells[int(start) : int(end)] = [str(action), *["-"] * (int(end - start) - 1)]
        text = " ".join(cell.ljust(width) for cell in cells[:SHOWN_SLOTS]).rstrip()
        lines.append(f"{c:>3} | {text}{' ...' if slots > SHOWN_SLOTS else ''}")
    return "\n".join(lines + note)


def unit_spans(table: Table) -> tuple[list[list[Span]], list[str]]:
    """Return the spans of actions of unit costs. Of a schedule that does not run to its end, its
    actions one after the other, and a note that says so.
    """
    try:
        return spans_of(table, _units), []
    except ScheduleError:
        note = (
            "the schedule deadlocks, so rows are not aligned in time; schedule.check() gives the "
            "reason"
        )
        return [_one_after_the_other(row) for row in table], [note]


def _one_after_the_other(row: Sequence[Action]) -> list[Span]:
    ends = list(itertools.accumulate(map(_units, row)))
    return [Span(end - _units(action), end) for action, end in zip(row, ends, strict=True)]


def _units(action: Action) -> int:
    return len(action.results)
