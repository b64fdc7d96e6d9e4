"""Partial sums of float16 and bfloat16 values stay in float32, in which each rank accumulates,
until they are reduced: rounding a sum of 64 terms once is not rounding it 64 times.

It is a pass over a finished plan, so it adds no collective. Gradients are left to
`reduce_dtype`, and collectives of per-rank code to their author.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from ....ops.placement import ALIGN
from ....types import MeshAxes
from ... import plan, rules
from ...collective_bytes import nbytes
from ...rules.pointwise import LINEAR_IN_FIRST
from ..values import is_partial

aten = torch.ops.aten

HALF = (torch.float16, torch.bfloat16)
WIDE = torch.float32
MOST_BYTES = 64 * 1024  # that a redistribution may send more than it would
SUMS = {aten.sum.default, aten.sum.dim_IntList}  # they take the dtype of the sum
ADDS = {aten.add.Tensor, aten.sub.Tensor}

NewSlot = Callable[[torch.Tensor, Any], plan.Slot]


def reduced_in_float32(
    steps: Sequence[plan.Step], gradients: Sequence[plan.Slot], axes: MeshAxes, new_slot: NewSlot
) -> list[plan.Step]:
    """Rewrite a plan so that small Partial sums of half precision are reduced in float32.

    Args:
        steps: of the plan of a program, or of the body of a loop.
        gradients: the gradients that it makes.
        axes: of the mesh.
        new_slot: makes a slot of a fake value and placements.
    """
    wanted = _wanted(steps, gradients, axes)
    return _Widened(wanted, new_slot).all(steps) if wanted else list(steps)


def _wanted(steps: Sequence[plan.Step], gradients: Sequence[plan.Slot], axes: MeshAxes) -> set[int]:
    """Find the slots to compute in float32: Partial sums that are reduced, and what they are
    computed from.
    """
    computed: set[int] = set()
    for step in steps:
        if isinstance(step, plan.Apply) and len(step.outs) == 1:
            computed.add(step.outs[0].number)
    wanted: set[int] = set()
    served = {slot.number for slot in gradients}
    for step in reversed(steps):
        made = {slot.number for slot in step.made}
        if made & served:
            served.update(slot.number for slot in step.read)
        elif isinstance(step, plan.Redistribute):
            if step.source.number in computed and _is_widened(step, axes):
                wanted.add(step.source.number)
        elif made & wanted and _passes_on(step, computed):
            wanted.update(slot.number for slot in step.read)
    return wanted


def _is_widened(step: plan.Redistribute, axes: MeshAxes) -> bool:
    """Return whether a redistribution reduces a half-precision sum and would send little more
    in float32.
    """
    source = step.source
    sent = [m for m in step.moves if m.sends and axes.sizes[m.axis] > 1]
    sums = [m for m in sent if m.before[m.axis] == "sum" != m.after[m.axis]]
    is_gradient = step.node.target is ALIGN or step.node.meta.get("phase") == "backward"
    if source.value.dtype not in HALF or not sums or is_gradient:
        return False
    itemsize = WIDE.itemsize - source.value.dtype.itemsize
    more = [nbytes(source.value.shape, itemsize, move, axes) for move in sent]
    return sum(more) < MOST_BYTES


def _passes_on(step: plan.Step, computed: set[int]) -> bool:
    """Return whether a step only adds, scales or rearranges Partial sums."""
    if not isinstance(step, plan.Apply) or not step.ins:
        return False
    is_own = all(_is_sum(slot, computed) for slot in step.ins)
    return is_own and _is_linear(step)


def _is_linear(step: plan.Apply) -> bool:
    """Return whether an op is linear, so that it may run in float32 on the terms."""
    target = step.node.target
    if target in ADDS:
        return True
    if len(step.ins) != 1:
        return False
    return target in LINEAR_IN_FIRST or target in SUMS or rules.row_of(target).rearranges


def _is_sum(slot: plan.Slot, computed: set[int]) -> bool:
    """Return whether a slot is a half-precision Partial value that an op of this plan computed."""
    is_own = slot.number in computed and slot.value.dtype in HALF
    return is_own and is_partial(slot.placements)


@attrs.define(eq=False)
class _Widened:
    """The rewrite of a plan's steps, with a float32 slot for each slot that is computed so."""

    wanted: set[int]
    new_slot: NewSlot
    wide: dict[int, plan.Slot] = attrs.field(factory=dict)  # by the slot's number

    def all(self, steps: Sequence[plan.Step]) -> list[plan.Step]:
        """Rewrite all steps, in their order."""
        result: list[plan.Step] = []
        for step in steps:
            result += self.in_float32(step)
        return result

    def in_float32(self, step: plan.Step) -> list[plan.Step]:
        """Rewrite one step, with the casts that it needs."""
        if isinstance(step, plan.Redistribute):
            source = self.wide.get(step.source.number)
            if source is None:
                return [step]
            return self.reduced(step, source)
        if not isinstance(step, plan.Apply) or len(step.outs) != 1:
            return [step]
        (out,) = step.outs
        if out.number not in self.wanted:
            return [step]
        wide = self.wide[out.number] = self.float32_slot(out)
        ins = tuple(self.wide.get(slot.number, slot) for slot in step.ins)
        is_sum = step.node.target in SUMS
        are_wide = all(slot.number in self.wide for slot in step.ins)
        if not is_sum and not (are_wide and _is_linear(step)):
            return [step, _cast(step.node, out, wide)]
        options = {"dtype": WIDE} if is_sum else {}
        node = _copied(step.node, ins, wide, **options)
        applied = plan.Apply(node, ins, (wide,))
        return [applied, _cast(step.node, wide, out)]

    def reduced(self, step: plan.Redistribute, source: plan.Slot) -> list[plan.Step]:
        """Redistribute in float32, and cast the result."""
        target = self.float32_slot(step.target)
        moved = attrs.evolve(step, source=source, target=target)
        return [moved, _cast(step.node, target, step.target)]

    def float32_slot(self, slot: plan.Slot) -> plan.Slot:
        """Make the float32 slot of a slot."""
        return self.new_slot(slot.value.to(WIDE), slot.placements)


def _copied(
    node: torch.fx.Node, ins: Sequence[plan.Slot], out: plan.Slot, **options: Any
) -> torch.fx.Node:
    """Copy a node's op onto other values, in a graph of its own."""
    graph = torch.fx.Graph()
    feed = iter(ins)
    args, kwargs = torch.fx.node.map_arg(
        (node.args, dict(node.kwargs)), lambda _: _holder(graph, next(feed))
    )
    copy = graph.create_node(
        "call_function", node.target, args, {**kwargs, **options}, name=node.name
    )
    copy.meta = {**node.meta, "val": out.value}
    return copy


def _cast(node: torch.fx.Node, source: plan.Slot, target: plan.Slot) -> plan.Apply:
    """Make the step that casts a slot to the dtype of another."""
    graph = torch.fx.Graph()
    cast = graph.create_node(
        "call_function",
        aten._to_copy.default,
        (_holder(graph, source),),
        {"dtype": target.value.dtype},
        name=node.name,
    )
    cast.meta = {**node.meta, "val": target.value}
    return plan.Apply(cast, (source,), (target,))


def _holder(graph: torch.fx.Graph, slot: plan.Slot) -> torch.fx.Node:
    """Make the placeholder that stands for a slot."""
    holder = graph.placeholder(f"slot{slot.number}")
    holder.meta["val"] = slot.value
    return holder
