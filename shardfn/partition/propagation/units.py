"""Strategies for one mesh axis, adapted to the units in which values are already sharded, and
combined with those of earlier axes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from ...types import PENDING, Mark, Marks
from .. import layout, rules
from ..rule_api.strategy import Choice, OpCall
from .values import Placed


def with_units(call: OpCall, choice: Choice, held: Sequence[Collection[Mark]]) -> list[Choice]:
    """A strategy of an op in the units in which its inputs are sharded.

    Args:
        call: the op.
        choice: the strategy.
        held: for each input its placements so far, on the axis of the strategy.
    """
    return in_units(choice, held, strided=functools.partial(rules.takes_strided, call, choice))


def fit(call: OpCall, choice: Choice, placed: Placed, sizes: tuple[int, ...]) -> Placed | None:
    """The placements of an op with one more axis. None if a unit does not fit.

    Args:
        call: the op.
        choice: the strategy on that axis.
        placed: the placements on the axes before.
        sizes: of the mesh.
    """
    ins = _all_extended(call.ins, placed.ins, choice[0], sizes)
    outs = _all_extended(call.outs, placed.outs, choice[1], sizes)
    return None if ins is None or outs is None else Placed(ins, outs)


def _all_extended(
    tensors: Sequence[torch.Tensor],
    placed: Sequence[Marks],
    row: Sequence[Mark],
    sizes: tuple[int, ...],
) -> list[Marks] | None:
    """The placements of some tensors with one more axis. None where one does not fit."""
    longer: list[Marks] = []
    for x, marks, mark in zip(tensors, placed, row, strict=True):
        fitting = extended(x.shape, marks, mark, sizes)
        if fitting is None:
            return None
        longer.append(fitting)
    return longer


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
