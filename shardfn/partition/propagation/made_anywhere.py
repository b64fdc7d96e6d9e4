"""Values that each rank can make for itself at any placement: random numbers, expanded scalars,
and what is computed element by element from them alone.

They are made where they are read, at the placement that the reader wants: only a rank's shard,
and nothing is sent.
"""

from __future__ import annotations

import torch

from ... import _compat
from ...ops.placement import REDISTRIBUTE
from ...ops.random_bits import RANDOM_BITS
from ...types import Marks
from .. import plan, rules
from ..protocols import Walk
from ..rule_api.strategy import OpCall
from .values import Value

EXPAND = torch.ops.aten.expand.default
READ_ANYWHERE = {RANDOM_BITS, REDISTRIBUTE}  # prims that read a value at any placement


def reads_slots(node: torch.fx.Node) -> bool:
    """Whether a node must find its inputs made: a loop, or a prim."""
    is_op = isinstance(node.target, _compat.OpOverload)
    is_prim = is_op and _compat.namespace_of(node.target) == "shardfn"
    return not is_op or (is_prim and node.target not in READ_ANYWHERE)


def is_made_anywhere(call: OpCall, values: list[Value]) -> bool:
    """Whether an op's result can be made at any placement, given its arguments."""
    if any(v.varies for v in values) or len(call.outs) != 1:
        return False
    if call.target is RANDOM_BITS:
        return len(values) == 1 and call.ins[0].dim() == 1 and _is_replicated(values[0])
    if call.target is EXPAND:
        value = values[0]
        return not value.fake.dim() and (value.fill is not None or _is_replicated(value))
    if not rules.is_pointwise(call.target) or not any(v.recipe for v in values):
        return False
    return all(_follows(v, call.outs[0]) for v in values)


def _is_replicated(value: Value) -> bool:
    """Whether every rank has the global tensor anyway."""
    return any(all(m == "R" for m in marks) for marks in value.slots)


def _follows(value: Value, result: torch.Tensor) -> bool:
    """Whether an argument can be made at whatever placement its result gets."""
    if not value.fake.dim():
        return value.is_unmade or _is_replicated(value)
    is_free = value.recipe is not None or value.fill is not None
    return is_free and value.fake.shape == result.shape


def unmade(node: torch.fx.Node, values: list[Value]) -> Value:
    """The result of an op that is run where it is read, at any placement."""
    users = len(node.users)
    recipe = (node, tuple(values))
    return Value(node.meta["val"], early=False, recipe=recipe, users=users)


def make_inputs(walk: Walk, node: torch.fx.Node) -> None:
    """Make the inputs of a node that could be made at any placement, replicated."""
    replicated = ("R",) * len(walk.axes.sizes)
    for read in node.all_input_nodes:
        value = walk.values[read]
        if isinstance(value, Value) and value.recipe and not value.slots:
            walk.redistribute(value, replicated, node, implicit=False)


def make(walk: Walk, value: Value, marks: Marks) -> plan.Slot:
    """Make a value at a placement."""
    assert value.recipe is not None
    node, values = value.recipe
    replicated = ("R",) * len(marks)
    is_random = node.target is RANDOM_BITS
    ins = tuple(
        walk.redistribute(
            v, replicated if is_random or not v.fake.dim() else marks, node, implicit=False
        )
        for v in values
    )
    slot = walk.slot(value.fake, marks)
    walk.steps.append(plan.Apply(node, ins, (slot,)))
    value.slots[marks] = slot, None
    return slot
