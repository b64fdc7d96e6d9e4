"""Tables of placements: a small picture of the shards of each parameter, and its bytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..byte_sizes import human_bytes
from ..placement import marks_of
from ..placement_table import ArgumentPlacements, Placements, Row
from ..training.plans import Strategy
from ..types import MeshAxes
from .bars import Bar, bars
from .held import grid_of_blocks, sharding
from .sheet import (
    COLOURS,
    LINE,
    MARGIN,
    PALE,
    SMALL,
    TEXT,
    WIDTH,
    Panel,
    Sheet,
    box,
    label,
    short,
    wide_of,
)
from .tensors import colours, outline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_ROWS = 24
PICTURE = 44.0, 22.0  # points
ROW = 30.0


def table(x: Placements) -> Sheet:
    """Lay out the picture of a table of placements."""
    panel, notes = panel_of(x)
    return Sheet([x.total], [panel], notes)


def arguments(x: ArgumentPlacements) -> Sheet:
    """Lay out the picture of the placements of a call's arguments."""
    return table(x.table)


def strategy(x: Strategy) -> Sheet:
    """Lay out the picture of a strategy."""
    rows = (("parameters", x.params), ("gradients", x.grads), ("optimizer state", x.state))
    held = [
        Bar(name, placed.nbytes, human_bytes(placed.nbytes), COLOURS[k])
        for k, (name, placed) in enumerate(rows)
    ]
    panel, notes = panel_of(x.params, "Parameters")
    lines = [f"{x.name}: {x.params.total}", f"batch {x.batch}; activations {x.activations}"]
    return Sheet(lines, [bars(held, "Bytes a rank"), panel], notes)


def panel_of(x: Placements, title: str = "", most: int = MOST_ROWS) -> tuple[Panel, list[str]]:
    """Return the rows of a table, and notes for the end of the sheet."""
    rows = x.rows
    shown = rows[:most]
    draw = functools.partial(_draw, shown, x.axes)
    notes = []
    if len(rows) > len(shown):
        notes.append(f"The table has {len(rows)} rows, of which the first {len(shown)} are shown.")
    if x.axes is None:
        notes.append("The mesh is not known, so shards are not drawn.")
    elif any(row.sizes is not None for row in shown):
        notes.append("Blocks of the same colour are on the same ranks.")
    if any(row.stages for row in shown):
        notes.append("Dashed: one stage holds it.")
    return Panel(ROW * len(shown), draw, title), notes


def _draw(rows: Sequence[Row], axes_of_mesh: MeshAxes | None, axes: Axes) -> None:
    page = WIDTH - 2 * MARGIN
    left = PICTURE[0] + 10
    for k, row in enumerate(rows):
        y = k * ROW
        if row.sizes is not None:
            _draw_shards(axes, row, axes_of_mesh, y + 3)
        count = len(row.paths)
        size = f"{count} × {human_bytes(row.nbytes // count)}" if count > 1 else ""
        size = size or human_bytes(row.nbytes)
        room = page - left - wide_of(size, SMALL) - 8
        name = short(row.path, int(room / wide_of("0", TEXT)))
        label(axes, left, y + 0.7 * LINE, name, size=TEXT, weight="bold")
        label(axes, page, y + 0.7 * LINE, size, ha="right")
        shape = row.shape.replace("x", "×")
        text = "  ".join(part for part in (row.placement, shape, row.dtype) if part)
        most = int((page - left) / wide_of("0", SMALL))
        label(axes, left, y + 1.65 * LINE, short(text, most))


def _draw_shards(axes: Axes, row: Row, mesh: MeshAxes | None, top: float) -> None:
    """Draw the blocks of a tensor."""
    assert row.sizes is not None
    wide, high = _sides(row.sizes)
    x, y = (PICTURE[0] - wide) / 2, top + (PICTURE[1] - high) / 2
    spec = None if mesh is None else row.spec
    mesh = MeshAxes((), ()) if mesh is None else mesh
    marks = ("R",) * len(mesh.names) if spec is None else marks_of(spec, row.sizes, mesh)
    shards = sharding(row.sizes, marks, mesh)
    grid = grid_of_blocks(shards)
    colour = colours(shards)
    for held, _ in shards.holdings():
        for cell in grid.cells(held.runs):
            at = x + cell.x * wide, y + cell.y * high
            size = cell.width * wide, cell.height * high
            box(axes, *at, *size, facecolor=colour[held.place], edgecolor="white", linewidth=0.4)
    style = "--" if row.stages else "-"
    for cell in grid.panels():
        outline(axes, cell, x, y, wide, high, linestyle=style, edgecolor=PALE)


def _sides(shape: Sequence[int]) -> tuple[float, float]:
    """Choose the sides of a small picture: those of the tensor, within limits."""
    across = math.prod(shape[-1::-2])
    down = math.prod(shape[-2::-2]) if len(shape) > 1 else 1
    if not across or not down:
        return PICTURE
    ratio = min(max(down / across, 0.2), 2.0)
    wide = min(PICTURE[0], PICTURE[1] / ratio)
    return wide, wide * ratio
