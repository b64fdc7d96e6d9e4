"""Values between the forward and the backward: cotangents that are given, and residuals that are
read again.
"""

from __future__ import annotations

import attrs
import torch

from ...ops.nodes import args_of
from ...types import REDUCTIONS, Marks
from .. import plan
from ..protocols import Walk
from .values import settled


def cotangent(walk: Walk, node: torch.fx.Node) -> None:
    """The cotangent of a result enters with the placements of the result, reduced."""
    result, number = args_of(node)
    value = walk.values[result]
    marks = walk.leaving.get(result) or settled(value, walk.axes, walk.given)
    reduced = tuple("R" if m in REDUCTIONS else m for m in marks)
    slot = walk.cotangents[number] = walk.slot(value.fake, reduced)
    walk.place_as(node, value, slot)


def after(walk: Walk, node: torch.fx.Node) -> None:
    """`after`: a value at each of its placements, but not before another value is available."""
    value, token = (walk.values[x] for x in args_of(node))
    tokens = token.readable("backward")
    if value.fill is not None or not tokens:
        walk.values[node] = value
        return
    slots: dict[Marks, tuple[plan.Slot, str | None]] = {}
    for slot, only in value.slots.values():
        if only in (None, "backward"):
            later = walk.slot(value.fake, slot.marks)
            slots[slot.marks] = later, only
            walk.steps.append(plan.Apply(node, (slot, tokens[0]), (later,)))
    walk.values[node] = attrs.evolve(value, slots=slots, users=len(node.users))
