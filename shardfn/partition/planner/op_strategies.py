"""The strategies that an op may take on one mesh axis, given its placements on earlier axes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from ...types import AxisPlacement
from .. import rules
from ..propagation.asked_ways import asked_rows
from ..propagation.strategy_units import fit, with_units
from ..propagation.values import Placed, Value, can_be_drawn
from ..propagation.walk import Chosen, Walk
from ..rule_api.check_strategies import strategies_of
from ..rule_api.strategy import Choice, OpCall, replicated
from .share import share_of

# A strategy that gives a rank more than so many even shares of an op is left out, unless that is
# little of it: a row on each of some ranks.
UNEVEN, LITTLE = 2.0, 1 / 8


def fitting(
    walk: Walk,
    node: torch.fx.Node,
    chosen: Chosen,
    before: Placed,
    held: Sequence[Collection[AxisPlacement]],
) -> list[Placed]:
    """List the placements that an op may take on the next mesh axis.

    Args:
        walk: the walk that chose one op at a time.
        node: the op.
        chosen: what the walk chose for it.
        before: its placements on the decided axes.
        held: for each input, the placements at which it may be made.
    """
    axis = len(before.outs[0])
    found: dict[Any, Placed] = {}
    for row in _rows(walk, node, chosen, axis):
        for choice in with_units(chosen.call, row, held):
            placed = fit(chosen.call, choice, before, walk.axes.sizes)
            if placed is not None and _can_read(chosen.values, placed, axis):
                found.setdefault(on_axis(placed, axis), placed)
    n = walk.axes.sizes[axis]
    usual = on_axis(chosen.placed, axis)
    return [
        placed
        for here, placed in found.items()
        if here == usual or _is_balanced(share(walk, chosen.call, placed, axis), n)
    ]


def on_axis(placed: Placed, axis: int) -> Choice:
    """Return the placements of an op on one axis."""
    return tuple(m[axis] for m in placed.ins), tuple(m[axis] for m in placed.outs)


def share(walk: Walk, call: OpCall, placed: Placed, axis: int) -> float:
    """Return the share of an op's work that the busiest rank of an axis has."""
    tensors = (*call.outs, *call.ins)
    placements = (*placed.outs, *placed.ins)
    return share_of(zip(tensors, placements, strict=True), walk.axes.sizes, axis)


def _rows(walk: Walk, node: torch.fx.Node, chosen: Chosen, axis: int) -> Iterator[Choice]:
    """Yield the strategies of an op's rule; an op on varying values is only replicated."""
    varies = frozenset().union(*(v.varies for v in chosen.values))
    if walk.axes.names[axis] in {*varies, *walk.axes.closed}:
        yield replicated(chosen.call)
    else:
        rule = rules.find(chosen.call.target)
        rows = strategies_of(rule, chosen.call, walk.name, node)
        yield from asked_rows(chosen.call, rows, walk.axes, axis, walk.name, node)


def _can_read(values: Sequence[Value], placed: Placed, axis: int) -> bool:
    """Return whether constants and random inputs can be made at these placements."""
    for value, placements in zip(values, placed.ins, strict=True):
        placement = placements[axis]
        if value.fill is not None and not rules.fill_fits(value.fill[1], placement):
            return False
        if value.recipe is not None and not can_be_drawn(placement):
            return False
    return True


def _is_balanced(share: float, n: int) -> bool:
    """Return whether the busiest rank has at most twice its even share."""
    return share == 1.0 or share <= max(UNEVEN / n, LITTLE)
