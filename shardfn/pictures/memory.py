"""Memory over a step, by kind, with its peak; and the tensors that are alive at the peak."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..byte_sizes import human_bytes
from ..inspect.memory import KINDS, Memory, Moment
from ..source_text import located_in_program
from .bars import Bar, bars, keys
from .sheet import COLOURS, INK, SMALL, Panel, Sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOUR: dict[str, str] = dict(zip(KINDS, COLOURS, strict=False))
MOST_MOMENTS = 400  # of a plot
HEIGHT = 120.0
BACKWARD, AFTER = "backward", "after it"


def memory(x: Memory) -> Sheet:
    """Lay out the picture of the memory of a program."""
    where = f", at {located_in_program(x.at, x.module)}" if x.at else ""
    lines = [f"{x.name}: {human_bytes(x.peak)} on one rank{where}"]
    return Sheet(lines, panels_of(x))


def panels_of(x: Memory, most: int = 8) -> list[Panel]:
    """Draw the memory over the step, and the largest tensors at the peak."""
    moments = _fewer(x.moments())
    used = [kind for k, kind in enumerate(KINDS) if any(m.sizes[k] for m in moments)]
    panels = []
    if moments:
        draw = functools.partial(_draw, moments, x.peak)
        title = "Memory while the ops of a step run, in order"
        panels = [
            Panel(HEIGHT, draw, title, left=44.0, right=6.0, bottom=14.0),
            keys([(COLOUR[kind], kind, None) for kind in used]),
        ]
    rows = [
        Bar(
            f"{tensor.name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}",
            tensor.nbytes,
            human_bytes(tensor.nbytes),
            COLOUR[tensor.kind],
            located_in_program(tensor.source, tensor.module),
        )
        for tensor in x.alive
    ]
    if rows:
        panels.append(bars(rows, "Values in memory at the peak, the largest first", most))
    return panels


def _fewer(moments: Sequence[Moment]) -> list[Moment]:
    """Choose at most so many moments: of each part of the step the one that holds most."""
    step = -(-len(moments) // MOST_MOMENTS) or 1
    parts = [moments[k : k + step] for k in range(0, len(moments), step)]
    return [max(part, key=lambda moment: moment.nbytes) for part in parts]


def _draw(moments: Sequence[Moment], peak: int, axes: Axes) -> None:
    """Stack the kinds of tensors over the step."""
    edges = [*range(len(moments) + 1)]
    below = [0.0] * len(edges)
    for k, kind in enumerate(KINDS):
        sizes = [moment.sizes[k] for moment in moments]
        above = [a + b for a, b in zip(below, [*sizes, sizes[-1]], strict=True)]
        axes.fill_between(
            edges, below, above, step="post", color=COLOUR[kind], linewidth=0, label=kind
        )
        below = above
    totals = [moment.nbytes for moment in moments]
    at = max(range(len(totals)), key=totals.__getitem__)
    most = max(totals) or 1
    axes.plot([at + 0.5], [totals[at]], marker="v", color=INK, markersize=4, clip_on=False)
    is_late = at > len(moments) / 2
    axes.annotate(
        f"peak {human_bytes(peak)}",
        (at + 0.5, totals[at]),
        xytext=(-7 if is_late else 7, 4),
        textcoords="offset points",
        ha="right" if is_late else "left",
        size=SMALL,
        color=INK,
    )
    axes.set_xlim(0, len(moments))
    axes.set_ylim(0, 1.18 * most)
    ticks = [0, most / 2, most]
    axes.set_yticks(ticks, [human_bytes(int(tick)) for tick in ticks])
    _mark_phases(moments, most, axes)


def _mark_phases(moments: Sequence[Moment], most: int, axes: Axes) -> None:
    """Write under the step where its forward and backward are."""
    phases = [moment.phase for moment in moments]
    if BACKWARD in phases:  # an update of parameters, say
        end = len(phases) - phases[::-1].index(BACKWARD)
        phases[end:] = [AFTER] * (len(phases) - end)
    bounds = [0, *(k for k in range(1, len(phases)) if phases[k] != phases[k - 1]), len(phases)]
    ticks, texts = [], []
    for start, stop in itertools.pairwise(bounds):
        if phases[start] and stop - start >= len(phases) / 8:
            ticks.append((start + stop) / 2)
            texts.append(phases[start])
            for edge in (start, stop):
                axes.plot([edge, edge], [0, 0.04 * most], color=INK, linewidth=0.8)
    axes.set_xticks(ticks, texts)
    axes.tick_params(axis="x", length=0)
