"""Strategies for one mesh axis, adapted to the units in which values are already sharded, and
combined with those of earlier axes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence

from ...types import PENDING, Mark, Marks
from .. import layout
from ..rule_api.strategy import Choice


def in_units(
    choice: Choice, held: Sequence[Collection[Mark]], *, strided: Callable[[], bool]
) -> list[Choice]:
    """The strategy for each unit, and each number of blocks, in which an input is already
    sharded on the dim that the strategy shards.

    Args:
        choice: the strategy.
        held: for each input its placements so far, on the axis of the strategy.
        strided: whether the op may run on strided shards. Called only if there are some.
    """
    scales = {(1, 1)}
    for mark, marks in zip(choice[0], held, strict=True):
        if not isinstance(mark, str):
            scales.update(_scales(mark, marks, strided))
    if len(scales) == 1:
        return [choice]
    return [
        (_scaled(choice[0], u, o), _scaled(choice[1], u, o)) for u, o in sorted(scales)
    ]  # in one order: all ranks break ties alike


def _scales(
    wanted: Mark, marks: Collection[Mark], strided: Callable[[], bool]
) -> Iterator[tuple[int, int]]:
    """How often a strategy's unit, and its number of blocks, go into those of an input."""
    dim, unit = layout.cut_of(wanted)
    outer = layout.outer_of(wanted)
    for mark in marks:
        cut = layout.split(mark)
        if cut is None or cut[0] != dim:
            continue
        blocks, rest = divmod(layout.outer_of(mark), outer)
        if rest or (blocks > 1 and not strided()):
            continue
        # even chunks have the unit 1, whatever the strategy's
        if cut[1] % unit == 0:
            yield cut[1] // unit, blocks
        elif blocks > 1:
            yield 1, blocks


def _scaled(marks: tuple[Mark, ...], unit: int, outer: int) -> tuple[Mark, ...]:
    return tuple(layout.scaled(m, unit, outer) for m in marks)


@functools.lru_cache(maxsize=4096)
def extended(
    shape: tuple[int, ...], marks: Marks, mark: Mark, sizes: tuple[int, ...]
) -> Marks | None:
    """The placements with one more axis. None if they are incompatible."""
    pending = {m for m in (*marks, mark) if m in PENDING}
    if len(pending) > 1:
        return None
    if isinstance(mark, str):
        return (*marks, mark)
    end = len(marks) + 1
    return layout.canonical(shape, (*marks, mark), sizes[:end], sizes[end:])
