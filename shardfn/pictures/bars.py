"""Horizontal bars with a line of text above each: the largest of many, and how many are left."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from .sheet import INK, LINE, MARGIN, PALE, SMALL, WIDTH, Panel, box, label, short, wide_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

THICK = 7.0  # points
STEP = LINE + THICK + 4
IMPLICIT = "xxxx"  # hatching


class Bar(NamedTuple):
    """One bar.

    Args:
        name: what it is of, on the left.
        size: its length, in any unit.
        text: its size as text, on the right.
        colour: of the bar.
        where: the line in the user's code, after the name where there is place.
        hatch: a pattern over the colour.
        mark: a length at which a line crosses the bar; None for none.
    """

    name: str
    size: float
    text: str
    colour: str
    where: str = ""
    hatch: str | None = None
    mark: float | None = None


def bars(rows: Sequence[Bar], title: str = "", most: int = 14) -> Panel:
    """Draw bars in their order, and how many there are beside those that are drawn."""
    shown = rows[:most]
    more = len(rows) - len(shown)
    height = STEP * len(shown) + (LINE if more else 0)
    return Panel(height, functools.partial(_draw, shown, more), title)


def _draw(rows: Sequence[Bar], more: int, axes: Axes) -> None:
    page = WIDTH - 2 * MARGIN
    longest = max((max(row.size, row.mark or 0.0) for row in rows), default=0) or 1
    for k, row in enumerate(rows):
        y = k * STEP
        place = page - wide_of(row.text, SMALL) - 8
        letters = int(place / wide_of("0", SMALL))
        name = short(row.name, letters)
        label(axes, 0, y + LINE / 2, name)
        left = letters - len(name) - 2
        if row.where and left >= 8:
            where = short(row.where, left)
            label(axes, place, y + LINE / 2, where, ha="right", color=PALE)
        label(axes, page, y + LINE / 2, row.text, ha="right")
        wide = max(page * row.size / longest, 0.8)
        box(axes, 0, y + LINE, wide, THICK, facecolor=row.colour, hatch=row.hatch, edgecolor=PALE)
        if row.mark is not None:
            x = page * row.mark / longest
            axes.plot([x, x], [y + LINE - 2, y + LINE + THICK + 2], color=INK, linewidth=1)
    if more:
        label(axes, 0, len(rows) * STEP + LINE / 2, f"and {more} more", color=PALE)


def keys(rows: Sequence[tuple[str, str, str | None]]) -> Panel:
    """Say what colours and patterns mean, in one or more lines.

    Args:
        rows: colour, meaning and pattern.
    """
    places = []
    x, y = 0.0, 0.0
    for _, text, _ in rows:
        wide = 14 + wide_of(text, SMALL) + 12
        if x and x + wide > WIDTH - 2 * MARGIN:
            x, y = 0.0, y + LINE
        places.append((x, y))
        x += wide
    return Panel(y + LINE, functools.partial(_draw_keys, rows, places))


def _draw_keys(
    rows: Sequence[tuple[str, str, str | None]], places: Sequence[tuple[float, float]], axes: Axes
) -> None:
    for (colour, text, hatch), (x, y) in zip(rows, places, strict=True):
        box(axes, x, y + 2, 10, 8, facecolor=colour, hatch=hatch, edgecolor=PALE)
        label(axes, x + 14, y + LINE / 2, text)
