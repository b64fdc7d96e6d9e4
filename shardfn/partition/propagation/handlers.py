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
from ...types import REDUCTIONS, MeshPlacements
from .. import plan
from . import constraints, gradients, place_sorts, walk_shard_map  # noqa: F401  it fills rows of PRIMS
from .loops import walk_loops
from .partial import add_partials_first, shared_partials
from .values import default_placements, value_of_slot
from .walk import HANDLERS, Walk

aten = torch.ops.aten


def element(walk: Walk, node: Node) -> None:
    """Place a getitem: its value is one of the results of an op."""
    source, number = args_of(node)
    walk.values[node] = x = walk.values[source][number]
    x.users = shared_partials.counted_readers(node, x.slots, walk.ahead.choices)


def cotangent(walk: Walk, node: Node) -> None:
    """Place the cotangent of a result like the result, with Partial reduced."""
    result, number = args_of(node)
    value = walk.values[result]
    placements = walk.leaving.get(result) or default_placements(
        value, walk.axes, walk.user_placements
    )
    reduced = tuple("R" if m in REDUCTIONS else m for m in placements)
    slot = walk.cotangents[number] = walk.slot(value.fake, reduced)
    walk.values[node] = value_of_slot(slot, len(node.users), value.varies)


def after(walk: Walk, node: Node) -> None:
    """Place a residual that the backward reads only once another value is available."""
    value, token = (walk.values[x] for x in args_of(node))
    tokens = token.readable("backward")
    if value.fill is not None or not tokens:
        walk.values[node] = value
        return
    slots: dict[MeshPlacements, tuple[plan.Slot, str | None]] = {}
    for slot, only in value.slots.values():
        if only in (None, "backward"):
            later = walk.slot(value.fake, slot.placements)
            slots[slot.placements] = later, only
            walk.steps.append(plan.Apply(node, (slot, tokens[0]), (later,)))
    walk.values[node] = attrs.evolve(value, slots=slots, users=len(node.users))


def add(walk: Walk, node: Node) -> None:
    """Place an addition: of two gradients of one parameter, of Partial terms, or by the rule."""
    if not gradients.add_unaligned(walk, node) and not add_partials_first.add_later(walk, node):
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
        aten.sort.default: place_sorts.rows,
        aten.sort.stable: place_sorts.rows,
        aten.index.Tensor: place_sorts.rows,
        aten.index_select.default: place_sorts.rows,
        operator.getitem: element,
    }
)
