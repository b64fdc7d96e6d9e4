"""A schedule as a grid of text, and as a picture: a row for each coordinate, time to the right."""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence

from ..errors import ScheduleError
from .actions import KINDS, Action
from .running import Span, Table, spans_of

SHOWN_SLOTS = 120  # columns of a grid
HUES = {"F": 215, "B": 25, "W": 130, "BW": 355}  # of a colour wheel
SLOT, ROW, MARGIN = 30, 24, 24  # pixels


def grid(table: Table) -> str:
    """Print a row for each coordinate and a column for each unit of time. F, B and W take one unit,
    BW two.

    Example:
        >>> print(grid([[Action("F", 0, 0), Action("BW", 0, 0)]]))
          0 | F0.0  BW0.0 -
    """
    spans, note = _unit_spans(table)
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


def picture(name: str, table: Table) -> str:
    """Draw a schedule as an SVG: a colour for each kind, lighter for later microbatches."""
    spans, note = _unit_spans(table)
    slots = int(max(row[-1].end for row in spans if row))
    most = max(1, *(action.microbatch for row in table for action in row))
    width, height = slots * SLOT + 2 * MARGIN, (len(table) + 2) * ROW
    boxes = []
    for c, row in enumerate(table):
        y = (c + 1) * ROW
        boxes.append(_text(MARGIN - 6, y, str(c), "end"))
        boxes += [_box(action, span, y, most) for action, span in zip(row, spans[c], strict=True)]
    words = " ".join([name, *note])
    about = ", ".join(f"{kind}: {of}" for kind, of in KINDS.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="10" style="background: white">'
        f"{_text(MARGIN, 0, words, 'start')}{''.join(boxes)}"
        f"{_text(MARGIN, (len(table) + 1) * ROW, about, 'start')}</svg>"
    )


def _unit_spans(table: Table) -> tuple[list[list[Span]], list[str]]:
    """Return the spans of actions of unit costs. Of a schedule that does not run to its end, its
    actions one after the other, and a note that says so.
    """
    try:
        return spans_of(table, _units), []
    except ScheduleError:
        note = "it does not run to its end: each row is in its own time; schedule.check() says why"
        return [_one_after_the_other(row) for row in table], [note]


def _one_after_the_other(row: Sequence[Action]) -> list[Span]:
    ends = list(itertools.accumulate(map(_units, row)))
    return [Span(end - _units(action), end) for action, end in zip(row, ends, strict=True)]


def _units(action: Action) -> int:
    return len(action.results)


def _box(action: Action, span: Span, y: int, most: int) -> str:
    """Draw an action; `most` is the last microbatch."""
    x, wide = MARGIN + span.start * SLOT, (span.end - span.start) * SLOT
    light = 55 + 30 * action.microbatch / most
    return (
        f'<g><title>{action}</title><rect x="{x:g}" y="{y}" width="{wide:g}" height="{ROW - 2}" '
        f'fill="hsl({HUES[action.kind]}, 65%, {light:.0f}%)" stroke="white"/>'
        f"{_text(x + wide / 2, y, str(action), 'middle')}</g>"
    )


def _text(x: float, y: int, words: str, anchor: str) -> str:
    place = f'x="{x:g}" y="{y + ROW * 2 // 3}" text-anchor="{anchor}"'
    return f"<text {place}>{html.escape(words)}</text>"
