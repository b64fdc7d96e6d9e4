"""Gradients are placed as their parameters, and reduced once."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch.fx import Node

from ...buckets import BucketOptions
from ...capture import annotations
from ...ops.nodes import args_of
from ...ops.placement import ALIGN, KEEPS_PARTIAL, REDISTRIBUTE
from ...placement import is_expressible
from ...types import PARTIAL_KINDS, AxisPlacement, MeshAxes, MeshPlacements
from .. import layout, plan
from ..rule_api.strategy import OpCall
from ..rules.pointwise import widens
from .constraints import constrained
from .values import Placed, UnplacedGradient, Value, in_plain_chunks, is_partial, value_of_slot
from .walk import Walk

ADD = torch.ops.aten.add.Tensor
CAST = torch.ops.aten._to_copy.default


def align(walk: Walk, node: Node) -> None:
    """Place a gradient like its parameter, unless it stays Partial until the end of its loop."""
    gradient, parameter, options = args_of(node)
    value = walk.values[gradient]
    slots = value.readable(node.meta["phase"])
    if node in walk.later and slots and is_partial(slots[0].placements):
        walk.values[node] = value_of_slot(slots[0], len(node.users), value.varies)
    else:
        place_gradient(walk, node, value, parameter, options)


def place_gradient(walk: Walk, node: Node, value: Value, parameter: Node, options: str) -> None:
    """Redistribute a gradient to the placement of its parameter, and note it for bucketing.

    Args:
        walk: the current walk.
        node: on whose behalf.
        value: the gradient.
        parameter: of the Program.
        options: the bucketing options of the gradient, as text; empty for none.
    """
    like = walk.values[parameter]
    wanted, placements = gradient_placements(walk, value, parameter, node)
    before = attrs.evolve(value, slots=dict(value.slots))
    walk.unplaced[node] = UnplacedGradient(before, parameter, options)
    slot = walk.redistribute(value, placements, node, implicit=False)
    walk.values[node] = value_of_slot(slot, len(node.users), value.varies)
    if options:
        walk.gradients[node] = plan.Gradient(
            node=node,
            options=BucketOptions.of(options),
            region=node.meta.get("custom", {}).get("gradients", ""),
            like=like.slots[wanted][0] if wanted in like.slots else None,
            slot=slot,
            unused=value.fill is not None and value.fill[1] == 0,
        )


def gradient_placements(
    walk: Walk, value: Value, parameter: Node, node: Node
) -> tuple[MeshPlacements, MeshPlacements]:
    """Return the placements of a parameter and of its gradient, which a constraint that alone
    reads it may change.
    """
    like = walk.values[parameter]
    shape = value.fake.shape
    wanted = next(iter(like.slots), walk.replicated)
    placements = aligned(shape, like.fake.shape, wanted, walk.axes)
    readers = list(node.users)
    if [reader.target for reader in readers] != [REDISTRIBUTE]:
        return wanted, placements
    _, text = args_of(readers[0])
    try:
        return wanted, constrained(text, walk.axes, shape, placements)
    except ValueError:
        return wanted, placements  # `constrain` refuses it


def aligned(
    shape: Sequence[int], like: Sequence[int], wanted: MeshPlacements, axes: MeshAxes
) -> MeshPlacements:
    """Copy the placements of a parameter to a gradient where their dims have equal sizes."""
    placements = tuple("R" if _differs(m, shape, like) else m for m in wanted)
    if is_expressible(placements, shape, axes):
        return layout.fitted(shape, placements, axes.sizes)
    return in_plain_chunks(shape, placements, axes)


def _differs(placement: AxisPlacement, shape: Sequence[int], like: Sequence[int]) -> bool:
    """Return whether a gradient cannot take one of its parameter's placements."""
    cut = layout.split(placement)
    if cut is None:
        return placement in PARTIAL_KINDS
    return shape[cut[0]] != like[cut[0]]


def add_unaligned(walk: Walk, node: Node) -> bool:
    """Add two gradients of one parameter before they are reduced. Returns whether the node is
    such a sum.
    """
    terms = node.all_input_nodes
    is_sum = node.target is ADD and len(terms) == 2 and not node.kwargs
    if not is_sum or any(len(term.users) > 1 for term in terms):
        return False
    if any(term not in walk.unplaced for term in terms):
        return False
    parts = [walk.unplaced[term] for term in terms]
    if parts[0].like is not parts[1].like:
        return False
    for term, part in zip(terms, parts, strict=True):
        walk.values[term] = part.value
        walk.gradients.pop(term, None)
    walk.merged.update(terms)
    walk.apply(node)
    place_gradient(walk, node, walk.values[node], parts[0].like, parts[0].options)
    return True


def cast(walk: Walk, node: Node) -> None:
    """Place a cast: one of a gradient like the parameter, any other one by its rule."""
    call, values = walk.call(node)
    walk.apply(node, cast_placement(walk, node, call, values))


def cast_placement(walk: Walk, node: Node, call: OpCall, values: list[Value]) -> Placed | None:
    """Return the placement of a cast that makes a gradient; None for any other cast.

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
    if not slots or not is_partial(slots[0].placements):
        return None
    if KEEPS_PARTIAL in (node.meta.get("custom") or {}):
        return Placed([slots[0].placements], [slots[0].placements])
    is_left = reader.op == "output" and _is_reduced_after(node, call)  # by a body
    if is_left or _is_there_and_back(node, reader, call):
        placements = slots[0].placements
        return Placed([placements], [placements])
    if not _is_gradient(reader):
        return None
    _, parameter, options = args_of(reader)
    is_after = reader in walk.later or _reduces_after(node, options, call)
    own = slots[0].placements
    placements = own if is_after and widens(call) else None
    if placements is None:
        _, placements = gradient_placements(walk, value, parameter, reader)
    return Placed([placements], [placements]) if walk.reaches(value, placements) else None


def _is_gradient(reader: Node) -> bool:
    """Return whether a node places a gradient like its parameter."""
    return reader.target is ALIGN


def _is_there_and_back(node: Node, reader: Node, call: OpCall) -> bool:
    """Return whether a gradient is cast to its reduction dtype and then back, so that it is
    reduced in between.
    """
    if reader.target is not CAST or not all(map(_is_gradient, reader.users)):
        return False
    return _is_reduced_after(node, call)


def _is_reduced_after(node: Node, call: OpCall) -> bool:
    """Return whether mixed_precision has a gradient reduced in the wider dtype that a cast
    makes.
    """
    return widens(call) and _reduces_after(node, "", call)


def _reduces_after(node: Node, options: str, call: OpCall) -> bool:
    """Return whether a gradient is to be reduced in the dtype that a cast makes, by
    bucketed_grad or mixed_precision.
    """
    asked = BucketOptions.of(options).reduce_dtype if options else None
    name = asked or (annotations.reduced_in(node) or "").removeprefix("torch.")
    return name == str(call.outs[0].dtype).removeprefix("torch.")
