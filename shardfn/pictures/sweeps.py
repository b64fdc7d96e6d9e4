"""A sweep: the time of each row over its peak, and the front of what is neither slower nor larger
than another.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..byte_sizes import human_bytes
from ..durations import human_seconds
from ..pipelines import Schedule
from ..sweeps.table import Row, Sweep
from .bars import Bar, bars, keys
from .sheet import COLOURS, INK, PALE, Panel, Sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEIGHT = 130.0
SIZE = 22.0  # of a point
MOST_ROWS = 10  # of the front
OVER = "xxxx"


def sweep(x: Sweep) -> Sheet:
    """Lay out the picture of a sweep: a plot for each hardware, and the rows of its front."""
    names = dict.fromkeys(row.strategy for row in x.rows)
    colours = {name: COLOURS[k % len(COLOURS)] for k, name in enumerate(names)}
    panels = []
    for hardware in dict.fromkeys(row.hardware for row in x.rows):
        rows = [row for row in x.rows if row.hardware == hardware]
        draw = functools.partial(_draw, rows, colours)
        title = f"{hardware}: time of a step against peak memory of a rank"
        panels.append(Panel(HEIGHT, draw, title, left=52.0, right=14.0, bottom=16.0))
        panels += _front([row for row in rows if row.is_front], colours)
    used: list[tuple[str, str, str | None]] = [
        (colour, name, None) for name, colour in colours.items() if name
    ]
    if any(row.excess for row in x.rows):
        used.append(("none", "needs more memory than a rank has", OVER))
    best = x.best
    lines = [
        f"{x.name}: {len(x.rows)} combinations",
        f"the fastest{'' if best.excess else ' that fits'}: {_name(best)}, "
        f"{human_seconds(best.time.total)} on {best.hardware}, {human_bytes(best.peak)} a rank",
    ]
    notes = [f"{len(x.refused)} more cannot be."] if x.refused else []
    return Sheet(lines, [*([keys(used)] if used else []), *panels], notes)


def _front(rows: Sequence[Row], colours: Mapping[str, str]) -> list[Panel]:
    """Draw the rows of a front, the fastest first."""
    every = [
        Bar(
            _name(row),
            row.time.total,
            f"{human_seconds(row.time.total)}, {human_bytes(row.peak)}",
            colours[row.strategy],
        )
        for row in rows
    ]
    return [bars(every, "Pareto front: no other row is both faster and smaller", MOST_ROWS)] * bool(
        every
    )


def _name(row: Row) -> str:
    """Name a row by its mesh, layout and options."""
    texts = [x.name if isinstance(x, Schedule) else f"{k}={x}" for k, x in row.options.items()]
    return " ".join(filter(None, [str(row.axes), row.strategy, *texts]))


def _draw(rows: Sequence[Row], colours: Mapping[str, str], axes: Axes) -> None:
    """Draw a point for each row, and the front as a line."""
    for row in rows:
        style: dict[str, Any] = {"facecolors": colours[row.strategy]}
        if row.excess:
            style = {"facecolors": "none", "hatch": OVER}
        style["edgecolors"] = INK if row.is_front else PALE
        point = axes.scatter(
            [row.peak], [row.time.total], s=SIZE, linewidths=0.8, zorder=3, **style
        )
        figures = f"{human_seconds(row.time.total)}, {human_bytes(row.peak)}"
        point.set_gid(f"at {_name(row)}: {figures}".replace('"', "'"))
    front = sorted((row.peak, row.time.total) for row in rows if row.is_front)
    if front:
        axes.step(*zip(*front, strict=True), where="post", color=INK, linewidth=0.8, zorder=2)
    peaks, times = [row.peak for row in rows], [row.time.total for row in rows]
    _set_ends(axes, max(peaks), max(times))


def _set_ends(axes: Axes, peak: int, seconds: float) -> None:
    """Let both axes begin at zero, with a few ticks as text."""
    axes.set_xlim(0, 1.08 * peak)
    axes.set_ylim(0, 1.12 * seconds)
    places = [0, peak / 2, peak]
    axes.set_xticks(places, [human_bytes(int(x)) for x in places])
    places = [0, seconds / 2, seconds]
    axes.set_yticks(places, [human_seconds(x) for x in places])
