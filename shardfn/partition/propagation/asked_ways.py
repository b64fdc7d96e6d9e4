"""Strategies of attention that the user asks for: `attention={"cp": "ring"}`."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from ...axis_options import ULYSSES
from ...errors import PlacementError
from ...ops.higher_order import HigherOrder
from ...ops.nodes import origin_of
from ...types import ATTENTION, MeshAxes
from .. import rules
from ..rule_api.strategy import Choice, OpCall
from ..rules.attention.arguments import tensors_by_name
from ..rules.attention.blocks import HEADS, QUERIES


def asked_rows(
    call: OpCall, rows: Sequence[Choice], axes: MeshAxes, axis: int, name: str, node: Node
) -> Sequence[Choice]:
    """Select the strategies of an op that the user asks for on an axis; all, if none is asked for.

    Args:
        call: the op.
        rows: the strategies of its rule.
        axes: of the mesh.
        axis: one of them.
        name: of the function, for errors.
        node: of the op.

    Raises:
        PlacementError: this attention has no such strategy, or its key heads do not divide.
    """
    way = axes.option(ATTENTION, axis)
    way_of = rules.row_of(call.target).way_of
    n = axes.sizes[axis]
    if way is None or way_of is None or n == 1 or rules.of_user(call.target):
        return rows
    by_way = {way_of(call, row): row for row in rows}
    tensors = tensors_by_name(call)
    few = tensors["key"].shape[HEADS]
    divides = way != ULYSSES or few % n == 0
    if way in by_way and divides:
        return [row for row in rows if way_of(call, row) == way]
    others = [x for x in by_way if x not in (None, way) and (x != ULYSSES or few % n == 0)]
    raise PlacementError.of(
        f"{name}, attention",
        f"attention over {axes.names[axis]!r} must be computed by {way!r}, which is not possible "
        f"for {_described(call)}",
        needed=_needed(call, way, n),
        fix=f"attention={{{axes.names[axis]!r}: {others[0]!r}}}"
        if others
        else f"no attention= for {axes.names[axis]!r}",
        **origin_of(node),
        arg_path="attention",
    )


def is_asked(axes: MeshAxes, node: Node, moved: Sequence[int]) -> bool:
    """Return whether the user asks for collectives of an op over some axes."""
    is_known = rules.row_of(node.target).way_of is not None
    return is_known and bool(moved) and all(axes.option(ATTENTION, axis) for axis in moved)


def refuse_together(call: OpCall, axes: MeshAxes, axis: int, name: str, node: Node) -> None:
    """Refuse the strategy that the user asks for on an axis, if there is one: it does not go
    together with those of the axes before.

    Raises:
        PlacementError: names the axes.
    """
    way = axes.option(ATTENTION, axis)
    if way is None or not axis or rules.row_of(call.target).way_of is None:
        return
    own, before = axes.names[axis], ", ".join(map(repr, axes.names[:axis]))
    raise PlacementError.of(
        f"{name}, attention",
        f"attention over {own!r} must be computed by {way!r}, which does not go together with how "
        f"{before} shards it",
        needed="causal rings in which one axis shards the sequence; and, where there are fewer key "
        "heads than query heads, axes that shard both before those that shard query heads alone",
        fix=f"no attention= for {own!r}; or inputs that {before} shards on another dim",
        **origin_of(node),
        arg_path="attention",
    )


def _needed(call: OpCall, way: str | None, n: int) -> str:
    """Return what attention needs to be computed by a strategy, over n ranks."""
    if way == ULYSSES:
        return f"a number of key heads that is divisible by {n}, the number of ranks"
    if tensors_by_name(call)["query"].shape[QUERIES] == 1:
        return "two queries or more"
    if not isinstance(call.target, HigherOrder):
        return (
            "attention with as many queries as keys if causal, without dropout, and with a mask "
            "only if the kernel accepts one"
        )
    return "F.scaled_dot_product_attention, or queries whose number the blocks of the mask divide"


def _described(call: OpCall) -> str:
    """Describe an attention for an error."""
    tensors = tensors_by_name(call)
    query, key = tensors["query"], tensors["key"]
    parts = [
        f"{query.shape[QUERIES]} queries of {query.shape[HEADS]} heads",
        f"{key.shape[QUERIES]} keys of {key.shape[HEADS]}",
    ]
    if isinstance(call.target, HigherOrder):
        return ", ".join([*parts, "by flex_attention"])
    if call["is_causal"]:
        parts.append("causal")
    if "attn_mask" in tensors or "attn_bias" in tensors:
        parts.append("with a mask")
    if call["dropout_p"]:
        parts.append("with dropout")
    return ", ".join(parts)
