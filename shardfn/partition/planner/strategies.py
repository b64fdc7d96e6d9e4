"""The strategies that an op may take on one mesh axis, given its placements on earlier axes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from ...types import Mark
from .. import rules
from ..propagation.units import fit, with_units
from ..propagation.values import Placed, Value, is_numbered
from ..propagation.walk import Chosen, Walk
from ..rule_api.checked import answered
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
    held: Sequence[Collection[Mark]],
) -> list[Placed]:
    """The placements that an op may take on the axis after those that are decided.

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
    """The placements of an op on one axis."""
    return tuple(m[axis] for m in placed.ins), tuple(m[axis] for m in placed.outs)


def share(walk: Walk, call: OpCall, placed: Placed, axis: int) -> float:
    """The share of an op's work that the busiest rank of an axis has."""
    tensors = (*call.outs, *call.ins)
    marks = (*placed.outs, *placed.ins)
    return share_of(zip(tensors, marks, strict=True), walk.axes.sizes, axis)


def _rows(walk: Walk, node: torch.fx.Node, chosen: Chosen, axis: int) -> Iterator[Choice]:
    """The strategies of an op's rule. Values that vary between ranks are computed by each."""
    varies = frozenset().union(*(v.varies for v in chosen.values))
    if walk.axes.names[axis] in varies:
        yield replicated(chosen.call)
    else:
        rule = rules.find(chosen.call.target)
        yield from answered(rule, chosen.call, walk.name, node)


def _can_read(values: Sequence[Value], placed: Placed, axis: int) -> bool:
    """Whether the inputs that no op made can have these placements: constants, random numbers."""
    for value, marks in zip(values, placed.ins, strict=True):
        mark = marks[axis]
        if value.fill is not None and not rules.fill_fits(value.fill[1], mark):
            return False
        if value.recipe is not None and not is_numbered(mark):
            return False
    return True


def _is_balanced(share: float, n: int) -> bool:
    return share == 1.0 or share <= max(UNEVEN / n, LITTLE)
