"""The table of the walk: which function places a node of which kind.

A node without a row is placed by its sharding rule (`Walk.apply`); the prims of per-rank code have
their functions in the table of prims (walk_shard_map.py puts them there).
"""

from __future__ import annotations

import operator

import attrs
import torch
from torch.fx import Node

from ...ops.loops import Branch, Scan, While
from ...ops.nodes import args_of
from ...ops.placement import AFTER, ALIGN, COTANGENT, REDISTRIBUTE
from ...types import REDUCTIONS, Marks
from .. import plan
from . import constraints, gradients, walk_shard_map  # noqa: F401  it fills rows of PRIMS
from .loops import walk_loops
from .partial import ends, sums
from .sorted_rows import place
from .sorted_rows.kinds import OwnRows
from .values import at_one_placement, settled
from .walk import HANDLERS, Walk

aten = torch.ops.aten


def element(walk: Walk, node: Node) -> None:
    """One of several results of an op is its value."""
    source, number = args_of(node)
    walk.values[node] = x = walk.values[source][number]
    x.users = ends.reducing(node, x.slots, walk.ahead.choices)


def cotangent(walk: Walk, node: Node) -> None:
    """The cotangent of a result enters with the placements of the result, reduced."""
    result, number = args_of(node)
    value = walk.values[result]
    marks = walk.leaving.get(result) or settled(value, walk.axes, walk.given)
    reduced = tuple("R" if m in REDUCTIONS else m for m in marks)
    slot = walk.cotangents[number] = walk.slot(value.fake, reduced)
    walk.values[node] = at_one_placement(slot, len(node.users), value.varies)


def after(walk: Walk, node: Node) -> None:
    """A residual at each of its placements, but not before another value is available."""
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


def add(walk: Walk, node: Node) -> None:
    """A sum of gradients of one parameter, a sum with Partial terms, or any other one."""
    if not gradients.add_unaligned(walk, node) and not sums.add_later(walk, node):
        walk.apply(node)


HANDLERS.update(
    {
        # loops, by their types
        Scan: walk_loops.scan,
        While: walk_loops.while_loop,
        Branch: walk_loops.branch,
        # placements that the program sets
        REDISTRIBUTE: constraints.constrain,
        ALIGN: gradients.align,
        aten._to_copy.default: gradients.cast,
        aten.add.Tensor: add,
        # the two halves of a program with a backward
        COTANGENT: cotangent,
        AFTER: after,
        # ops on sorted rows, whatever they are
        OwnRows: place.place,
        aten.sort.default: place.sort,
        aten.sort.stable: place.sort,
        operator.getitem: element,
    }
)
