"""Gradients are placed as their parameters, and reduced once."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch.fx import Node

from ...buckets import Wish
from ...capture import annotations
from ...ops.nodes import args_of
from ...ops.placement import ALIGN, OF_TERMS, REDISTRIBUTE
from ...placement import is_said
from ...types import PENDING, Mark, Marks, MeshAxes
from .. import layout, plan
from ..rule_api.strategy import OpCall
from ..rules.pointwise import widens
from .constraints import constrained
from .values import Placed, Unaligned, Value, at_one_placement, in_plain_chunks, is_partial
from .walk import Walk

ADD = torch.ops.aten.add.Tensor
CAST = torch.ops.aten._to_copy.default


def align(walk: Walk, node: Node) -> None:
    """Redistribute a gradient to the placements of its parameter, unless it stays Partial until
    the end of its loop.
    """
    gradient, parameter, wish = args_of(node)
    value = walk.values[gradient]
    slots = value.readable(node.meta["phase"])
    if node in walk.later and slots and is_partial(slots[0].marks):
        walk.values[node] = at_one_placement(slots[0], len(node.users), value.varies)
    else:
        align_to(walk, node, value, parameter, wish)


def align_to(walk: Walk, node: Node, value: Value, parameter: Node, wish: str) -> None:
    """Redistribute a gradient to the placement of its parameter.

    Args:
        walk: the current walk.
        node: on whose behalf.
        value: the gradient.
        parameter: of the Program.
        wish: the bucketing options of the gradient, as text; empty for none.
    """
    like = walk.values[parameter]
    wanted, marks = aligned_to(walk, value, parameter, node)
    before = attrs.evolve(value, slots=dict(value.slots))
    walk.unaligned[node] = Unaligned(before, parameter, wish)
    slot = walk.redistribute(value, marks, node, implicit=False)
    walk.values[node] = at_one_placement(slot, len(node.users), value.varies)
    if wish:
        walk.gradients[node] = plan.Gradient(
            node=node,
            wish=Wish.of(wish),
            region=node.meta.get("custom", {}).get("gradients", ""),
            like=like.slots[wanted][0] if wanted in like.slots else None,
            slot=slot,
            unused=value.fill is not None and value.fill[1] == 0,
        )


def aligned_to(walk: Walk, value: Value, parameter: Node, node: Node) -> tuple[Marks, Marks]:
    """The placements of a parameter, and those of its gradient: those of the parameter, or of a
    constraint that is the only reader of the aligned gradient. So a gradient that is constrained
    to shards is reduce-scattered.
    """
    like = walk.values[parameter]
    shape = value.fake.shape
    wanted = next(iter(like.slots), walk.replicated)
    marks = aligned(shape, like.fake.shape, wanted, walk.axes)
    readers = list(node.users)
    if [reader.target for reader in readers] != [REDISTRIBUTE]:
        return wanted, marks
    _, text = args_of(readers[0])
    try:
        return wanted, constrained(text, walk.axes, shape, marks)
    except ValueError:
        return wanted, marks  # `constrain` refuses it


def aligned(shape: Sequence[int], like: Sequence[int], wanted: Marks, axes: MeshAxes) -> Marks:
    """The placements of `like` where its dims have the same size; replicated elsewhere."""
    marks = tuple("R" if _differs(m, shape, like) else m for m in wanted)
    if is_said(marks, shape, axes):
        return layout.fitted(shape, marks, axes.sizes)
    return in_plain_chunks(shape, marks, axes)


def _differs(mark: Mark, shape: Sequence[int], like: Sequence[int]) -> bool:
    """Whether a gradient cannot have a placement of its parameter."""
    cut = layout.split(mark)
    if cut is None:
        return mark in PENDING
    return shape[cut[0]] != like[cut[0]]


def add_unaligned(walk: Walk, node: Node) -> bool:
    """Add two gradients of one parameter before they are reduced, if nothing else reads them.
    Returns whether the op is such a sum.
    """
    terms = node.all_input_nodes
    is_sum = node.target is ADD and len(terms) == 2 and not node.kwargs
    if not is_sum or any(len(term.users) > 1 for term in terms):
        return False
    if any(term not in walk.unaligned for term in terms):
        return False
    parts = [walk.unaligned[term] for term in terms]
    if parts[0].like is not parts[1].like:
        return False
    for term, part in zip(terms, parts, strict=True):
        walk.values[term] = part.value
        walk.gradients.pop(term, None)
    walk.merged.update(terms)
    walk.apply(node)
    align_to(walk, node, walk.values[node], parts[0].like, parts[0].wish)
    return True


def cast(walk: Walk, node: Node) -> None:
    """A cast that makes a gradient is placed like the parameter, any other one by its rule."""
    call, values = walk.call(node)
    walk.apply(node, cast_placement(walk, node, call, values))


def cast_placement(walk: Walk, node: Node, call: OpCall, values: list[Value]) -> Placed | None:
    """The placement of a cast that makes a gradient. None for any other one.

    A parameter that is computed with in a smaller dtype has such a cast. It is placed like the
    parameter, so the gradient is reduced once, to the shard that is kept, and in the smaller
    dtype unless the options of the gradient say otherwise. A cast of `redistribute` is one of
    terms.
    """
    if len(node.users) != 1 or not values:
        return None  # a number may be cast too
    (reader,) = node.users
    (value,) = values
    slots = value.readable(node.meta["phase"])
    if not slots or not is_partial(slots[0].marks):
        return None
    if OF_TERMS in (node.meta.get("custom") or {}):
        return Placed([slots[0].marks], [slots[0].marks])
    is_left = reader.op == "output" and _is_reduced_after(node, call)  # by a body
    if is_left or _is_there_and_back(node, reader, call):
        marks = slots[0].marks
        return Placed([marks], [marks])
    if not _is_gradient(reader):
        return None
    _, parameter, wish = args_of(reader)
    is_after = reader in walk.later or _reduces_after(node, wish, call)
    own = slots[0].marks
    marks = own if is_after and widens(call) else None
    if marks is None:
        _, marks = aligned_to(walk, value, parameter, reader)
    return Placed([marks], [marks]) if walk.reaches(value, marks) else None


def _is_gradient(reader: Node) -> bool:
    """Whether an op places a gradient like its parameter."""
    return reader.target is ALIGN


def _is_there_and_back(node: Node, reader: Node, call: OpCall) -> bool:
    """Whether a gradient is cast to the dtype in which it is reduced, and then back: it is
    reduced before the second cast.
    """
    if reader.target is not CAST or not all(map(_is_gradient, reader.users)):
        return False
    return _is_reduced_after(node, call)


def _is_reduced_after(node: Node, call: OpCall) -> bool:
    """Whether a policy has the gradient reduced in the dtype that the cast makes."""
    return widens(call) and _reduces_after(node, "", call)


def _reduces_after(node: Node, wish: str, call: OpCall) -> bool:
    """Whether the gradient is to be reduced in the dtype that the cast makes. The options of
    bucketed_grad go before those of mixed_precision.
    """
    asked = Wish.of(wish).reduce_dtype if wish else None
    name = asked or (annotations.reduced_in(node) or "").removeprefix("torch.")
    return name == str(call.outs[0].dtype).removeprefix("torch.")
