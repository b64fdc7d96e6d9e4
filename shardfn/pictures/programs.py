"""A lowered program: where its arguments lie, its memory, its time and what it sends."""

from __future__ import annotations

from ..byte_sizes import human_bytes
from ..durations import human_seconds
from ..runtime.stages import Lowered
from . import collectives, memory, step_time, tables
from .sheet import Sheet

ROWS = 6  # of each part


def program(x: Lowered) -> Sheet:
    """Lay out the picture of one rank's program. Its times are those of an H100."""
    held, took, sent = x.memory, x.time(), x.collectives
    count = len(sent)
    noun = "collective" if count == 1 else "collectives"
    lines = [
        f"{x.program.name} on mesh {x.program.axes}",
        f"{human_bytes(held.peak)} of memory, {human_seconds(took.total)} on "
        f"{took.hardware}, {count} {noun} of {human_bytes(sum(c.nbytes for c in sent))} a rank",
    ]
    lines += [line.strip() for line in took.out_of_memory_line()]
    placed, notes = tables.panel_of(x.placements.table, "Arguments", ROWS)
    panels = [
        placed,
        *memory.panels_of(held, ROWS),
        *step_time.panels_of(took, ROWS),
        *collectives.panels_of(sent, "Collectives, in the order of their start", ROWS),
    ]
    return Sheet(lines, panels, notes)
