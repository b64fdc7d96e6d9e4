"""A DTensor: the blocks of its global tensor, and below them the local tensor of each rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed.tensor import DTensor

from .. import _compat
from ..errors import ShardError, call_site
from ..mesh import axes_of, ranks_of
from ..placement import marks_of
from ..simulated import SimulatedTensor
from .held import Cell, Grid, Held, Sharding, grid_of_blocks, grid_of_elements, sharding
from .sheet import (
    LINE,
    MARGIN,
    ON_COLOUR,
    PALE,
    SMALL,
    TEXT,
    WIDTH,
    Panel,
    Sheet,
    box,
    colour_of,
    label,
    short,
    wide_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMALL_SHAPE = 12, 16  # most elements to the right and down of a tensor whose values are written
ROOM = 27.0  # points for a value
GAP = 12.0
TERM = "////"  # hatching of a term of a value


class Drawn(NamedTuple):
    """What a picture of a tensor needs.

    Args:
        shards: who holds what.
        names: of the ranks of the mesh, row-major.
        colours: of ranks, by their places; equal for ranks that hold the same elements.
        values: of a place in the mesh and a place in its local tensor; None without values.
    """

    shards: Sharding
    names: Sequence[int]
    colours: dict[int, str]
    values: Callable[[int, tuple[int, ...]], Any] | None


def tensor(x: DTensor) -> Sheet:
    """Lay out the picture of a DTensor.

    Raises:
        ShardError: its placements are of a kind that pictures do not know.
    """
    axes = axes_of(x.device_mesh)
    try:
        marks = marks_of(list(x.placements), x.shape, axes)
    except ValueError as error:
        fix = "draw a DTensor whose placements are Shard, Replicate, Partial, sf.Stage or sf.Zigzag"
        raise ShardError.of("draw", str(error), fix=fix, source=call_site()) from error
    shards = sharding(x.shape, marks, axes)
    drawn = Drawn(shards, ranks_of(x.device_mesh), colours(shards), _values(x))
    dtype = str(x.dtype).removeprefix("torch.")
    shape = " × ".join(map(str, x.shape)) or "one element"
    lines = [f"DTensor of {dtype}, {shape}", f"mesh {axes}: {'; '.join(shards.words())}"]
    notes = _notes(drawn)
    panels = [Panel(height, draw) for height, draw in (_global(drawn), _local(drawn))]
    return Sheet(lines, panels, notes)


def colours(shards: Sharding) -> dict[int, str]:
    """Give a colour to each rank that holds something: equal to those that hold the same."""
    groups = shards.holdings()
    return {
        place: colour_of(k, len(groups)) for k, (_, places) in enumerate(groups) for place in places
    }


def _values(x: DTensor) -> Callable[[int, tuple[int, ...]], Any] | None:
    """Return the function that reads a value of a rank; None where not all values are here."""
    local: Any = _compat.local_tensor(x)
    if not isinstance(local, SimulatedTensor):
        return None
    shards = [shard.detach() for shard in local.shards]
    return lambda place, index: shards[place][index].item()


def _notes(drawn: Drawn) -> list[str]:
    """Say what the colours do not."""
    shards = drawn.shards
    notes = []
    if len(shards.shape) > 2:
        ways = [
            f"dim {dim} {'to the right' if k % 2 == 0 else 'down'}"
            for k, dim in enumerate(reversed(range(len(shards.shape))))
        ]
        notes.append(f"Dims are laid out from last to first: {', '.join(ways)}.")
    if shards.reductions:
        over = " and ".join(f"the {kind} over {name}" for name, kind in shards.reductions)
        notes.append(f"Hatched blocks: each rank holds a term. The value is {over}.")
    if shards.hidden:
        count = f"{len(shards.ranks) + shards.hidden:,} ranks"
        notes.append(f"Too many ranks to draw: {count}, of which {len(shards.ranks)} are shown.")
    if grid_of_blocks(shards).is_cut_off:
        notes.append("Too many blocks to draw: only the first blocks of a dim are shown.")
    empty = [held for held in shards.ranks if held.is_empty]
    if empty and 0 not in shards.shape:
        notes.append("A dashed outline marks a rank without elements.")
    return notes


def sides(sizes: Sequence[int], wide: float, least: float, most: float) -> tuple[float, float]:
    """Choose the sides, in points, of a picture of a tensor: as wide as there is place, and as high
    as its shape says, within limits.
    """
    columns = math.prod(sizes[d] for d in range(len(sizes) - 1, -1, -2)) if sizes else 1
    rows = math.prod(sizes[d] for d in range(len(sizes) - 2, -1, -2)) if len(sizes) > 1 else 1
    high = wide * rows / max(columns, 1)
    if len(sizes) < 2:
        high = least
    return (wide, min(max(high, least), most))


def _global(drawn: Drawn) -> tuple[float, Callable[[Axes], None]]:
    """Return the height of the global tensor, and the function that draws it: each block with the
    ranks that hold it.
    """
    shards = drawn.shards
    grid = grid_of_blocks(shards)
    wide = WIDTH - 2 * MARGIN
    folds = max(1, len(grid.sizes) - 2)
    _, high = sides(grid.sizes, wide, 34 + 12 * (folds - 1), 150)

    def draw(axes: Axes) -> None:
        for held, places in shards.holdings():
            names = ranges([drawn.names[place] for place in places])
            for cell in grid.cells(held.runs):
                x, y = cell.x * wide, cell.y * high
                size = cell.width * wide, cell.height * high
                style = _style(shards, drawn.colours[held.place])
                patch = box(axes, x, y, *size, **style)
                patch.set_gid(f"at ranks {names}: {text_of(cell)}")
                most = int((size[0] - 3) / wide_of("0", SMALL))
                if size[1] > SMALL and most >= min(len(names), 3):
                    middle = x + size[0] / 2, y + size[1] / 2
                    label(axes, *middle, short(names, most), ha="center", color=ON_COLOUR)
        for cell in grid.panels():
            outline(axes, cell, 0, 0, wide, high, linestyle=":" if shards.hidden else "-")

    return high, draw


def _style(shards: Sharding, colour: str) -> dict[str, Any]:
    """Return the style of a block that ranks hold."""
    hatch = TERM if shards.reductions else None
    return {"facecolor": colour, "edgecolor": "white", "hatch": hatch}


def outline(
    axes: Axes, cell: Cell, x: float, y: float, wide: float, high: float, **style: Any
) -> None:
    """Draw the outline of a cell of a picture at (x, y)."""
    style = {"edgecolor": PALE, "linewidth": 0.8, **style}
    at = x + cell.x * wide, y + cell.y * high
    box(axes, *at, cell.width * wide, cell.height * high, **style)


def text_of(cell: Cell) -> str:
    """Print the indices of a cell, as Python slices them."""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in cell.runs)}]"


def ranges(numbers: Sequence[int]) -> str:
    """Print numbers in order, and runs of them as ranges.

    Example:
        >>> ranges([0, 1, 2, 3, 6, 8, 9])
        '0–3, 6, 8, 9'
    """
    runs: list[list[int]] = []
    for k in sorted(numbers):
        if runs and runs[-1][-1] == k - 1:
            runs[-1].append(k)
        else:
            runs.append([k])
    parts = [[f"{run[0]}–{run[-1]}"] if len(run) > 2 else [str(k) for k in run] for run in runs]
    return ", ".join(text for part in parts for text in part)


class _Ranks(NamedTuple):
    """The geometry of the local tensors: panels in rows and columns."""

    grid: Grid
    columns: int
    wide: float
    high: float
    has_values: bool
    texts: dict[tuple[int, Cell], str]


def _local(drawn: Drawn) -> tuple[float, Callable[[Axes], None]]:
    """Return the height of the panels of ranks, and the function that draws them."""
    ranks = _ranks(drawn)
    rows = -(-len(drawn.shards.ranks) // ranks.columns)
    step = ranks.high + 2.1 * LINE
    return rows * step, functools.partial(_draw_ranks, drawn, ranks, step)


def _ranks(drawn: Drawn) -> _Ranks:
    """Choose values or blocks, and how many ranks stand beside each other."""
    shards = drawn.shards
    page = WIDTH - 2 * MARGIN
    across = math.prod(shards.shape[-1::-2])
    down = math.prod(shards.shape[-2::-2]) if len(shards.shape) > 1 else 1
    has_values = (
        drawn.values is not None
        and 0 < across <= SMALL_SHAPE[0]
        and down <= SMALL_SHAPE[1]
        and len(shards.ranks) * across * down <= 640
    )
    count = len(shards.ranks)
    if not has_values:
        columns = min(_even_columns(shards, 4), count)
        wide = (page - (columns - 1) * GAP) / columns
        folds = max(1, len(shards.shape) - 2)
        _, high = sides(shards.shape, min(wide, 160), 22 + 10 * (folds - 1), 90)
        return _Ranks(grid_of_blocks(shards), columns, min(wide, 160), high, False, {})
    grid = grid_of_elements(shards)
    texts = {
        (held.place, cell): _number(drawn, held, cell)
        for held in shards.ranks
        if held.runs is not None
        for cell in grid.cells(held.runs)
    }
    longest = max(map(len, texts.values()), default=1)
    room = max(14.0, wide_of("0" * longest, SMALL) + 5)
    most = max(1, int((page + GAP) // (max(across * room, 60) + GAP)))
    columns = min(_even_columns(shards, min(most, 4)), count)
    wide = min((page - (columns - 1) * GAP) / columns, max(across * 1.6 * room, 80))
    return _Ranks(grid, columns, wide, 14.0 * down, True, texts)


def _even_columns(shards: Sharding, most: int) -> int:
    """Choose the number of columns: ranks of the last axis stand beside each other."""
    last = 1 + max((held.coordinates[-1] for held in shards.ranks if held.coordinates), default=0)
    return next(n for n in range(most, 0, -1) if last % n == 0 or (n % last == 0))


def _number(drawn: Drawn, held: Held, cell: Cell) -> str:
    """Print the value of an element in the local tensor of a rank."""
    assert drawn.values is not None
    value = drawn.values(held.place, held.local([start for start, _ in cell.runs]))
    if isinstance(value, complex):
        return f"{value:.2g}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _draw_ranks(drawn: Drawn, ranks: _Ranks, step: float, axes: Axes) -> None:
    """Draw the local tensor of each rank."""
    shards = drawn.shards
    for k, held in enumerate(shards.ranks):
        row, column = divmod(k, ranks.columns)
        x, y = column * (ranks.wide + GAP), row * step
        name = f"rank {drawn.names[held.place]}"
        label(axes, x, y + 0.6 * LINE, name, size=TEXT, weight="bold")
        at = " ".join(f"{a}{c}" for a, c in zip(shards.axes.names, held.coordinates, strict=True))
        shape = "elsewhere" if held.shape is None else "×".join(map(str, held.shape)) or "scalar"
        left = int((ranks.wide - wide_of(name, TEXT) - 6) / wide_of("0", SMALL))
        both = f"{at} · {shape}"
        text = both if len(both) <= left else short(shape, max(left, 4))
        label(axes, x + ranks.wide, y + 0.6 * LINE, text, ha="right")
        top = y + 1.25 * LINE
        _draw_held(axes, drawn, ranks, held, x, top)
        for cell in ranks.grid.panels():
            line = "--" if held.is_empty else "-"
            outline(axes, cell, x, top, ranks.wide, ranks.high, linestyle=line)


def _draw_held(axes: Axes, drawn: Drawn, ranks: _Ranks, held: Held, x: float, top: float) -> None:
    """Draw the elements that a rank holds, and their values where there is place."""
    if held.is_empty:
        return
    style = _style(drawn.shards, drawn.colours[held.place])
    wide, high = ranks.wide, ranks.high
    for cell in ranks.grid.cells(held.runs):
        at = x + cell.x * wide, top + cell.y * high
        size = cell.width * wide, cell.height * high
        if ranks.has_values:
            style = {**style, "hatch": None}
        patch = box(axes, *at, *size, **style)
        patch.set_gid(f"at rank {drawn.names[held.place]}: {text_of(cell)}")
        if ranks.has_values:
            text = ranks.texts[held.place, cell]
            middle = at[0] + size[0] / 2, at[1] + size[1] / 2
            label(axes, *middle, text, ha="center", color=ON_COLOUR)
