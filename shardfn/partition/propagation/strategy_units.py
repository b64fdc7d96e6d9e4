"""Strategies for one mesh axis, adapted to the units in which values are already sharded, and
combined with those of earlier axes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from ...types import PARTIAL_KINDS, AxisPlacement, MeshPlacements
from .. import layout, rules
from ..rule_api.strategy import Choice, OpCall
from .values import Placed


def with_units(
    call: OpCall, choice: Choice, held: Sequence[Collection[AxisPlacement]]
) -> list[Choice]:
    """Adapt a strategy to the units and blocks in which an op's inputs are already sharded.

    Args:
        call: the op.
        choice: the strategy.
        held: for each input its placements so far, on the axis of the strategy.
    """
    return in_units(choice, held, strided=functools.partial(rules.takes_strided, call, choice))


def fit(call: OpCall, choice: Choice, placed: Placed, sizes: tuple[int, ...]) -> Placed | None:
    """Extend an op's placements by one mesh axis; None if a unit does not divide a chunk,
    or the op does not allow them together.

    Args:
        call: the op.
        choice: the strategy on that axis.
        placed: the placements on the axes before.
        sizes: of the mesh.
    """
    ins = _all_extended(call.ins, placed.ins, choice[0], sizes)
    outs = _all_extended(call.outs, placed.outs, choice[1], sizes)
    if ins is None or outs is None or not rules.fits(call, ins):
        return None
    return Placed(ins, outs)


def _all_extended(
    tensors: Sequence[torch.Tensor],
    placed: Sequence[MeshPlacements],
    row: Sequence[AxisPlacement],
    sizes: tuple[int, ...],
) -> list[MeshPlacements] | None:
    """Extend the placements of some tensors by one mesh axis; None if one does not fit."""
    longer: list[MeshPlacements] = []
    for x, placements, placement in zip(tensors, placed, row, strict=True):
        fitting = extended(x.shape, placements, placement, sizes)
        if fitting is None:
            return None
        longer.append(fitting)
    return longer


def in_units(
    choice: Choice, held: Sequence[Collection[AxisPlacement]], *, strided: Callable[[], bool]
) -> list[Choice]:
    """List a strategy once for each unit and number of blocks in which an input is already
    sharded.

    Args:
        choice: the strategy.
        held: for each input its placements so far, on the axis of the strategy.
        strided: whether the op may run on strided shards. Called only if there are some.
    """
    scales = {(1, 1)}
    for placement, placements in zip(choice[0], held, strict=True):
        if not isinstance(placement, str):
            scales.update(_scales(placement, placements, strided))
    if len(scales) == 1:
        return [choice]
    if any(map(layout.is_zigzag, (*choice[0], *choice[1]))):
        scales = {(unit, outer) for unit, outer in scales if outer > 0}
    return [
        (_scaled(choice[0], u, o), _scaled(choice[1], u, o)) for u, o in sorted(scales)
    ]  # in one order: all ranks break ties alike


def _scales(
    wanted: AxisPlacement, placements: Collection[AxisPlacement], strided: Callable[[], bool]
) -> Iterator[tuple[int, int]]:
    """Yield the factors between a strategy's unit and blocks and those of an input; the blocks of a
    zigzag are negative.
    """
    dim, unit = layout.dim_and_unit(wanted)
    for placement in placements:
        cut = layout.split(placement)
        if cut is None or cut[0] != dim:
            continue
        blocks = _blocks_in(placement, wanted)
        if blocks is None or (blocks != 1 and not strided()):
            continue
        # even chunks have the unit 1, whatever the strategy's
        if cut[1] % unit == 0:
            yield cut[1] // unit, blocks
        elif blocks != 1:
            yield 1, blocks


def _blocks_in(placement: AxisPlacement, wanted: AxisPlacement) -> int | None:
    """Return into how many blocks a placement divides each block of another one, negative for a
    zigzag; None if it does not.
    """
    blocks, rest = divmod(layout.block_count(placement), layout.block_count(wanted))
    if rest or (layout.is_zigzag(wanted) and not layout.is_zigzag(placement)):
        return None
    if layout.is_zigzag(placement) == layout.is_zigzag(wanted):
        return blocks
    return None if blocks % 2 else -blocks


def _scaled(
    placements: tuple[AxisPlacement, ...], unit: int, outer: int
) -> tuple[AxisPlacement, ...]:
    """Multiply the units and blocks of some placements."""
    return tuple(layout.scaled(m, unit, outer) for m in placements)


@functools.lru_cache(maxsize=4096)
def extended(
    shape: tuple[int, ...],
    placements: MeshPlacements,
    placement: AxisPlacement,
    sizes: tuple[int, ...],
) -> MeshPlacements | None:
    """Extend one tensor's placements by one mesh axis; None if they do not go together."""
    reductions = {m for m in (*placements, placement) if m in PARTIAL_KINDS}
    if len(reductions) > 1:
        return None
    if isinstance(placement, str) and all(map(layout.is_plain, placements)):
        return (*placements, placement)
    end = len(placements) + 1
    return layout.canonical(shape, (*placements, placement), sizes[:end], sizes[end:])
