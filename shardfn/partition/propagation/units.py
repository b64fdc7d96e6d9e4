"""Strategies for one mesh axis, adapted to the units in which values are already sharded, and
combined with those of earlier axes.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

from ...types import PENDING, Mark, Marks
from .. import layout
from ..rule_api.strategy import Choice


def in_units(choice: Choice, held: Sequence[Collection[Mark]]) -> list[Choice]:
    """The strategy for each unit in which an input is already sharded on the dim that the
    strategy shards.

    Args:
        choice: the strategy.
        held: for each input its placements so far, on the axis of the strategy.
    """
    units = {1}
    for mark, marks in zip(choice[0], held, strict=True):
        wanted = layout.split(mark)
        if wanted is None:
            continue
        for mark_held in marks:
            cut = layout.split(mark_held)
            if cut and cut[0] == wanted[0] and cut[1] % wanted[1] == 0:
                units.add(cut[1] // wanted[1])
    if len(units) == 1:
        return [choice]
    return [
        (_scaled(choice[0], u), _scaled(choice[1], u)) for u in sorted(units)
    ]  # in one order: all ranks break ties alike


def _scaled(marks: tuple[Mark, ...], unit: int) -> tuple[Mark, ...]:
    return tuple(layout.scaled(m, unit) for m in marks)


@functools.lru_cache(maxsize=65536)
def extended(
    shape: tuple[int, ...], marks: Marks, mark: Mark, sizes: tuple[int, ...]
) -> Marks | None:
    """The placements with one more axis. None if they are incompatible."""
    pending = {m for m in (*marks, mark) if m in PENDING}
    if len(pending) > 1:
        return None
    if isinstance(mark, str):
        return (*marks, mark)
    return layout.canonical(shape, (*marks, mark), sizes[: len(marks) + 1])
