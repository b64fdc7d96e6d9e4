"""The time of a step: its timeline, bars of what is busy, and the longest ops."""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..durations import human_seconds
from ..inspect.step_time import StepTime
from ..inspect.timeline.events import BUBBLE, COMPUTE, EXPOSED, axis_track
from ..source_text import located_in_program
from .bars import Bar, bars, keys
from .collectives import colours_of
from .sheet import MARGIN, ON_COLOUR, SMALL, WIDTH, Panel, Sheet, box, label, short, wide_of
from .timeline import timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEFT, RIGHT = 66.0, 54.0  # points for names and times
ROW = 20.0
BUSY, WAITING, IDLE = "#99ddff", "#ee8866", "#dddddd"
WAITS = "////"


class Part(NamedTuple):
    """A part of a bar."""

    name: str
    seconds: float
    colour: str
    hatch: str | None = None


def step_time(x: StepTime) -> Sheet:
    """Lay out the picture of the time of a step."""
    lines = [f"{x.name}: {human_seconds(x.total)} a step on {x.hardware}"]
    lines += [line.strip() for line in x.out_of_memory_line()]
    notes = [f"{x.endless} while loops count as one iteration each."] if x.endless else []
    colours = colours_of(op.axis for op in x.ops if op.axis is not None)
    tracks = {axis_track(axis): colour for axis, colour in colours.items()}
    own = {COMPUTE: BUSY, EXPOSED: WAITING, BUBBLE: IDLE}
    panel, left_out = timeline(x, collections.defaultdict(lambda: IDLE, {**tracks, **own}))
    return Sheet(lines, [panel, *panels_of(x)], [*notes, *left_out])


def panels_of(x: StepTime, most: int = 8) -> list[Panel]:
    """Draw the parts of a step, and its longest ops and collectives."""
    colours = colours_of(op.axis for op in x.ops if op.axis is not None)
    lanes = [("step", _parts(x)), ("compute", _by_name(x, None, BUSY))]
    lanes += [(f"over {axis}", _by_name(x, axis, colours[axis])) for axis in colours]
    lanes = [(name, parts) for name, parts in lanes if parts]
    draw = functools.partial(_draw, lanes)
    used = [
        (part.colour, f"{part.name} {human_seconds(part.seconds)}", part.hatch)
        for part in _parts(x)
    ]
    rows = [
        Bar(
            f"{op.count} × {op.name}" + ("" if op.axis is None else f" over {op.axis}"),
            op.seconds,
            human_seconds(op.seconds),
            BUSY if op.axis is None else colours[op.axis],
            located_in_program(op.source, op.module),
        )
        for op in x.ops
    ]
    panels = [Panel(ROW * len(lanes), draw, "Time of a step on each resource"), keys(used)]
    return [*panels, bars(rows, "The longest first", most)] if rows else panels


def _parts(x: StepTime) -> list[Part]:
    """Return what a step consists of, one after the other."""
    parts = [
        Part("compute", x.compute, BUSY),
        Part("exposed communication", x.exposed, WAITING),
        Part("bubble", x.bubble, IDLE, WAITS),
    ]
    return [part for part in parts if part.seconds]


def _by_name(x: StepTime, axis: str | None, colour: str) -> list[Part]:
    """Sum the time of ops, or of collectives over one axis, by name, the longest first."""
    seconds: dict[str, float] = {}
    for op in x.ops:
        if op.axis == axis:
            seconds[op.name] = seconds.get(op.name, 0.0) + op.seconds
    longest = sorted(seconds.items(), key=lambda row: -row[1])
    return [Part(name, took, colour) for name, took in longest]


def _draw(lanes: Sequence[tuple[str, Sequence[Part]]], axes: Axes) -> None:
    """Draw a bar for each lane, all on one scale of time."""
    page = WIDTH - 2 * MARGIN - LEFT - RIGHT
    longest = max((sum(part.seconds for part in parts) for _, parts in lanes), default=0) or 1
    for k, (name, parts) in enumerate(lanes):
        y = k * ROW
        x = LEFT
        label(axes, LEFT - 6, y + ROW / 2, short(name, 14), ha="right")
        for part in parts:
            wide = page * part.seconds / longest
            style = {"facecolor": part.colour, "hatch": part.hatch, "edgecolor": "white"}
            patch = box(axes, x, y + 2, wide, ROW - 4, **style)
            patch.set_gid(f"at {part.name}: {human_seconds(part.seconds)}")
            if wide_of(part.name, SMALL) < wide - 4:
                label(axes, x + wide / 2, y + ROW / 2, part.name, ha="center", color=ON_COLOUR)
            x += wide
        total = sum(part.seconds for part in parts)
        label(axes, x + 4, y + ROW / 2, human_seconds(total))
