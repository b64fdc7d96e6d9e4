"""A schedule of a pipeline: a row for each coordinate, time to the right."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..pipelines import Schedule
from ..pipelines.actions import KINDS, Action
from ..pipelines.drawing import unit_spans
from ..pipelines.running import Span
from .sheet import COLOURS, LINE, MARGIN, ON_COLOUR, SMALL, WIDTH, Panel, Sheet, box, label, wide_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOUR = dict(zip(KINDS, (COLOURS[0], COLOURS[1], COLOURS[6], COLOURS[3]), strict=True))
LEFT = 20.0  # points for the numbers of coordinates
ROW = 20.0
LOW_ROW = 7.0  # of an outline
MOST_BOXES, MOST_SLOTS, MOST_ROWS = 1200, 160, 64
COLUMNS = 180  # of an outline
DARKEST = 0.55  # of the last microbatch, how opaque its colour is
MIXED = COLOURS[7]


class Block(NamedTuple):
    """A part of the time of a coordinate, and the kinds of actions that it computes."""

    kinds: set[str]
    start: float
    end: float


def schedule(x: Schedule) -> Sheet:
    """Lay out the picture of a schedule: a box for each action, of a colour for each kind, paler
    for later microbatches. F, B and W take one unit of time, BW two. Of a large schedule the
    outline is drawn: when each coordinate computes which kinds.
    """
    spans, notes = unit_spans(x.table)
    end = max(row[-1].end for row in spans if row)
    rows = min(len(spans), MOST_ROWS)
    lines = [x.title]
    if not notes:
        busy = sum(span.end - span.start for row in spans for span in row)
        idle = 1 - busy / (end * len(spans))
        lines.append(f"{end:g} units of time, {idle:.0%} of them idle")
    used = [kind for kind in KINDS if any(action.kind == kind for action in x.actions)]
    meanings = [(COLOUR[kind], f"{kind}: {KINDS[kind]}") for kind in used]
    is_large = sum(map(len, x.table)) > MOST_BOXES or end > MOST_SLOTS
    if is_large:
        notes = [*notes, "The schedule is too large to draw; the picture shows its outline."]
        meanings.append((MIXED, "several of them"))
    if rows < len(spans):
        notes = [*notes, f"Of {len(spans)} coordinates, {rows} are shown."]
    high = LOW_ROW if is_large else ROW
    draw = functools.partial(_draw_outline if is_large else _draw, x, spans, rows, end)
    keys = Panel(LINE * len(meanings), functools.partial(_draw_keys, meanings))
    return Sheet(lines, [Panel(rows * high, draw), keys], notes)


def _draw(x: Schedule, spans: list[list[Span]], rows: int, end: float, axes: Axes) -> None:
    """Draw the rows of a schedule."""
    slot = (WIDTH - 2 * MARGIN - LEFT) / end
    most = max(1, x.microbatches - 1)
    has_stages = x.stages > x.coordinates
    for c in range(rows):
        label(axes, LEFT - 6, (c + 0.5) * ROW, str(c), ha="right")
        for action, span in zip(x.table[c], spans[c], strict=True):
            at = LEFT + span.start * slot, c * ROW + 1
            wide = (span.end - span.start) * slot
            _draw_action(axes, action, at, wide, most, has_stages=has_stages)


def _draw_outline(x: Schedule, spans: list[list[Span]], rows: int, end: float, axes: Axes) -> None:
    """Draw when each coordinate of a large schedule computes."""
    slot = (WIDTH - 2 * MARGIN - LEFT) / end
    step = -(-rows // 24)
    for c in range(rows):
        y = c * LOW_ROW
        if c % step == 0:
            label(axes, LEFT - 6, y + LOW_ROW / 2, str(c), ha="right", size=LOW_ROW - 0.5)
        for block in _blocks(x.table[c], spans[c], end):
            kinds = [*block.kinds]
            colour = COLOUR[kinds[0]] if len(kinds) == 1 else MIXED
            wide = (block.end - block.start) * slot
            box(axes, LEFT + block.start * slot, y + 0.5, wide, LOW_ROW - 1, facecolor=colour)


def _blocks(actions: Sequence[Action], spans: Sequence[Span], end: float) -> list[Block]:
    """Divide the time of a coordinate into columns, and join those in which it computes the same
    kinds of actions.
    """
    columns: list[set[str]] = [set() for _ in range(COLUMNS)]
    step = end / COLUMNS
    for action, span in zip(actions, spans, strict=True):
        first, last = int(span.start / step), math.ceil(span.end / step)
        for k in range(first, min(max(last, first + 1), COLUMNS)):
            columns[k].add(action.kind)
    blocks: list[Block] = []
    for k, kinds in enumerate(columns):
        if blocks and blocks[-1].kinds == kinds:
            blocks[-1] = blocks[-1]._replace(end=(k + 1) * step)
        else:
            blocks.append(Block(kinds, k * step, (k + 1) * step))
    return [block for block in blocks if block.kinds]


def _draw_action(
    axes: Axes, action: Action, at: tuple[float, float], wide: float, most: int, *, has_stages: bool
) -> None:
    """Draw an action; `most` is the last microbatch."""
    opaque = 1 - (1 - DARKEST) * action.microbatch / most
    colour = _paler(COLOUR[action.kind], opaque)
    patch = box(axes, *at, wide, ROW - 2, facecolor=colour, edgecolor="white")
    patch.set_gid(f"at {action}")
    texts = [str(action), str(action.microbatch)] if has_stages else [str(action.microbatch)]
    text = next((text for text in texts if wide_of(text, SMALL) < wide - 1), None)
    if text is not None:
        middle = at[0] + wide / 2, at[1] + ROW / 2 - 1
        label(axes, *middle, text, ha="center", color=ON_COLOUR)


def _paler(colour: str, share: float) -> str:
    """Mix a colour with white."""
    from matplotlib.colors import to_hex, to_rgb

    red, green, blue = (1 - share * (1 - part) for part in to_rgb(colour))
    return to_hex((red, green, blue))


def _draw_keys(meanings: Sequence[tuple[str, str]], axes: Axes) -> None:
    """Say what the colours are."""
    for k, (colour, text) in enumerate(meanings):
        y = (k + 0.5) * LINE
        box(axes, LEFT, y - 4, 10, 8, facecolor=colour)
        label(axes, LEFT + 15, y, text)
