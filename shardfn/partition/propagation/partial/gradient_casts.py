"""A cast that makes a gradient, as of parameters that are computed with in a smaller dtype: it is
placed like the parameter. So the gradient is reduced once, to the shard that is kept, and in the
smaller dtype unless the options of the gradient say otherwise. A cast of `redistribute` is one of
terms.
"""

from __future__ import annotations

import torch

from ....buckets import Wish
from ....capture import annotations
from ....ops.nodes import args_of
from ....ops.placement import OF_TERMS
from ...protocols import Walk
from ...rule_api.strategy import OpCall
from ...rules.pointwise import widens
from ..constraints import ALIGN, aligned_to
from ..values import Placed, Value, is_partial

CAST = torch.ops.aten._to_copy.default


def placed(walk: Walk, node: torch.fx.Node, call: OpCall, values: list[Value]) -> Placed | None:
    """The placements of such a cast; None for any other op.

    Args:
        walk: the current walk.
        node: an op.
        call: its call.
        values: its inputs.
    """
    if call.target is not CAST or len(node.users) != 1 or not values:
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


def _is_gradient(reader: torch.fx.Node) -> bool:
    """Whether an op places a gradient like its parameter."""
    return getattr(reader.target, "_opname", "") == ALIGN


def _is_there_and_back(node: torch.fx.Node, reader: torch.fx.Node, call: OpCall) -> bool:
    """Whether a gradient is cast to the dtype in which it is reduced, and then back: it is
    reduced before the second cast.
    """
    if reader.target is not CAST or not all(map(_is_gradient, reader.users)):
        return False
    return _is_reduced_after(node, call)


def _is_reduced_after(node: torch.fx.Node, call: OpCall) -> bool:
    """Whether a policy has the gradient reduced in the dtype that the cast makes."""
    return widens(call) and _reduces_after(node, "", call)


def _reduces_after(node: torch.fx.Node, wish: str, call: OpCall) -> bool:
    """Whether the gradient is to be reduced in the dtype that the cast makes. The options of
    bucketed_grad go before those of mixed_precision.
    """
    asked = Wish.of(wish).reduce_dtype if wish else None
    name = asked or (annotations.reduced_in(node) or "").removeprefix("torch.")
    return name == str(call.outs[0].dtype).removeprefix("torch.")
