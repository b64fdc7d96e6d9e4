"""The timeline of a step: a row for what a rank computes and waits for, one for each mesh axis, and
one for each coordinate of a pipeline. Time runs to the right.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..durations import human_seconds
from ..inspect.step_time import StepTime
from ..inspect.timeline.events import BUBBLE, COMPUTE, EXPOSED, Event
from ..inspect.timeline.ranks import RankTimeline
from ..source_text import located_in_program
from .sheet import LINE, MARGIN, ON_COLOUR, PALE, SMALL, WIDTH, Panel, box, label, short, wide_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEFT, RIGHT = 66.0, 8.0  # points for names, and beside the end
ROW, LOW_ROW = 18.0, 9.0  # of a few rows, and of many
MOST_ROWS = 16  # coordinates of a pipeline
MOST_EVENTS = 5000  # of a rank; more are drawn as blocks of a loop's turns
NARROW = 2.5  # points: shorter events that follow each other are joined


class Block(NamedTuple):
    """One or more events of a track that follow each other, as one box."""

    name: str
    where: str
    track: str
    start: float
    end: float
    events: int = 1

    @property
    def text(self) -> str:
        """Return what is shown where the pointer rests on it."""
        where = f", {self.where}" if self.where else ""
        more = f" and {self.events - 1} more" if self.events > 1 else ""
        return f"{self.name}{where}{more}: {human_seconds(self.end - self.start)}"


class Row(NamedTuple):
    """A row of the picture."""

    name: str
    events: Sequence[Event]


def timeline(x: StepTime, colours: Mapping[str, str]) -> tuple[Panel, list[str]]:
    """Draw what ranks do when, and say what is left out.

    Args:
        x: of a step.
        colours: of tracks.
    """
    rows, notes = _rows(x)
    end = max((event.end for row in rows for event in row.events), default=0.0) or 1.0
    scale = (WIDTH - 2 * MARGIN - LEFT - RIGHT) / end
    high = ROW if len(rows) <= MOST_ROWS // 2 else LOW_ROW
    lanes = [(row.name, list(blocks(row.events, NARROW / scale))) for row in rows]
    draw = functools.partial(_draw, lanes, end, scale, high, colours)
    return Panel(high * len(rows) + LINE, draw, "Timeline"), notes


def _rows(x: StepTime) -> tuple[list[Row], list[str]]:
    """Return the rows: of each coordinate what it computes and waits for, then the axes of the rank
    that the time is of.
    """
    notes = []
    own = _events(x.ranks[x.coordinate])
    if len(x.ranks) == 1:
        rows = [Row("compute", _of_rank(own))]
    else:
        rows = [Row(rank.title, _of_rank(_events(rank))) for rank in x.ranks[:MOST_ROWS]]
    if len(x.ranks) > len(rows):
        notes.append(f"Of {len(x.ranks)} coordinates, {len(rows)} are shown.")
    beside = "" if len(x.ranks) == 1 else f"{x.ranks[x.coordinate].title} "
    tracks = dict.fromkeys(event.track for event in own if event.track.startswith("axis "))
    for track in sorted(tracks):
        name = f"{beside}over {track.removeprefix('axis ')}"
        rows.append(Row(name, [event for event in own if event.track == track]))
    if any(event.repeats > 1 for event in own):
        notes.append(
            "A loop is drawn as one block: the compute of all iterations, then their waits."
        )
    return rows, notes


def _events(rank: RankTimeline) -> tuple[Event, ...]:
    return rank.run.unrolled(rank.run.depth_within(MOST_EVENTS))


def _of_rank(events: Sequence[Event]) -> list[Event]:
    """Return what a rank computes and waits for."""
    return [event for event in events if event.track in (COMPUTE, EXPOSED, BUBBLE)]


def blocks(events: Sequence[Event], narrow: float) -> Iterator[Block]:
    """Join events of one track that follow each other and are short, or parts of one action.

    Args:
        events: of a row, in order of their start.
        narrow: seconds.
    """
    last: Block | None = None
    for x in events:
        name = f"wait for {x.name}" if x.track == EXPOSED else x.name
        action = x.action if x.track == COMPUTE else None
        where = located_in_program(x.source, x.module)
        block = Block(action or name, "" if action else where, x.track, x.start, x.end)
        if last is None:
            last = block
            continue
        follows = x.track == last.track and x.start - last.end < narrow / 5
        is_short = min(block.end - block.start, last.end - last.start) < narrow
        if follows and (is_short or (action is not None and action == last.name)):
            longer = max(last, block, key=lambda each: each.end - each.start)
            events_in = 1 if action == last.name else last.events + 1
            last = longer._replace(start=last.start, end=block.end, events=events_in)
        else:
            yield last
            last = block
    if last is not None:
        yield last


def _draw(
    lanes: Sequence[tuple[str, Sequence[Block]]],
    end: float,
    scale: float,
    high: float,
    colours: Mapping[str, str],
    axes: Axes,
) -> None:
    """Draw the rows, and the scale of time below them."""
    size = SMALL if high == ROW else LOW_ROW - 2
    for k, (name, row) in enumerate(lanes):
        y = k * high
        label(axes, LEFT - 6, y + high / 2, short(name, 14), ha="right", size=size)
        for block in row:
            wide = max(scale * (block.end - block.start), 0.4)
            x = LEFT + scale * block.start
            style: dict[str, Any] = {"facecolor": colours[block.track], "edgecolor": "white"}
            style["hatch"] = "////" if block.track == BUBBLE else None
            style["linewidth"] = 0.5 if wide > NARROW else 0.0
            patch = box(axes, x, y + 1, wide, high - 2, **style)
            patch.set_gid(f"at {block.text}")
            texts = (block.name, block.name.partition(" ")[0]) if high == ROW else ()
            text = next((text for text in texts if wide_of(text, SMALL) < wide - 2), None)
            if text is not None:
                middle = x + wide / 2, y + high / 2
                label(axes, *middle, text, ha="center", color=ON_COLOUR)
    y = high * len(lanes) + LINE / 2
    axes.plot([LEFT, LEFT + scale * end], [y - LINE / 2] * 2, color=PALE, linewidth=0.6)
    label(axes, LEFT, y, "0", color=PALE)
    label(axes, LEFT + scale * end, y, human_seconds(end), ha="right", color=PALE)
