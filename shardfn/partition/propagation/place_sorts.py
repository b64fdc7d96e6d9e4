"""Placing rows that are sorted, or read the slices of their experts: they stay with their tokens,
go to their experts, or are gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch.fx import Node

from ...types import MeshPlacements
from .. import layout, plan
from ..rule_api.strategy import Choice
from .experts import dispatch_of, sends_matrices
from .local_sorts import LocalSort, RowOp, RowShard, local_sorts, place_row_op
from .unsorted_rows import unsorted_rows
from .walk import Walk


def rows(walk: Walk, node: Node) -> None:
    """Place a sort, or a lookup: locally on each rank where nothing reveals the order, at the
    experts, else by its rule.
    """
    graph = node.graph
    if graph not in walk.local_sorts:
        sorts = local_sorts(graph, walk.name)
        lookups = unsorted_rows(graph, walk.name)
        walk.local_sorts[graph] = {
            **{x: functools.partial(sort_locally, sort=own) for x, own in sorts.items()},
            **{x: functools.partial(at_their_experts, lookups=own) for x, own in lookups.items()},
        }
    place = walk.local_sorts[graph].get(node, Walk.apply)
    place(walk, node)


def at_their_experts(walk: Walk, node: Node, lookups: LocalSort) -> None:
    """Place the ops on rows that read slices by unsorted numbers: at their experts, if these are
    sharded and their matrices need not travel.
    """
    now = _now(walk, lookups, node)
    dispatch = None if now is None else dispatch_of(walk, node, lookups, now)
    stays = dispatch is not None and _may_stay(walk, lookups, dispatch.elements, dispatch.elements)
    if dispatch is None or not stays or sends_matrices(lookups, dispatch.ops):
        walk.apply(node)
        return
    for other in dispatch.ops:
        walk.overrides[other] = functools.partial(dispatch.place, op=lookups.ops[other])
    walk.overrides[node](walk, node)


def sort_locally(walk: Walk, node: Node, sort: LocalSort) -> None:
    """Place a sort on each rank's own rows if the elements are sharded and can stay so, else by
    its rule.
    """
    now = _now(walk, sort, node)
    place = None if now is None else _way(walk, node, sort, now)
    if place is None:
        walk.apply(node)
        return
    for other, op in sort.ops.items():
        if other not in sort.earlier:
            walk.overrides[other] = functools.partial(place, op=op)
    walk.overrides[node](walk, node)


def _way(
    walk: Walk, node: Node, sort: LocalSort, now: MeshPlacements
) -> Callable[..., None] | None:
    """Return how the ops on sorted rows are placed; None if the rows are gathered."""
    dispatch = dispatch_of(walk, node, sort, now)
    if dispatch is not None and _may_stay(walk, sort, now, dispatch.elements):
        return dispatch.place
    if _may_stay(walk, sort, now, now):
        return functools.partial(place_row_op, elements=now)
    return None


def _now(walk: Walk, sort: LocalSort, node: Node) -> MeshPlacements | None:
    """Return how the sorted elements are sharded; None if they are not placed on all ranks."""
    value = walk.values[sort.elements]
    slots = value.readable(node.meta.get("phase", "forward"))
    if value.varies or not slots:
        return None
    return tuple(m if layout.split(m) else "R" for m in slots[0].placements)


def _may_stay(walk: Walk, sort: LocalSort, now: MeshPlacements, elements: MeshPlacements) -> bool:
    """Return whether ranks may sort their own elements, sharded so.

    Args:
        walk: the walk.
        sort: what is known of the sort.
        now: the placements of the elements, with which ops before the sort were placed.
        elements: those with which ranks are to sort them.
    """
    is_sharded = any(m != "R" for m in elements)
    if not is_sharded or any(any(layout.halo(m)) for m in elements):
        return False
    (n,) = sort.elements.meta["val"].shape
    whole = all(_has_whole_rows(n, elements, each, walk.axes.sizes) for each in sort.each)
    return whole and all(_is_placed(walk, x, sort.ops[x], now) for x in sort.earlier)


def _has_whole_rows(n: int, elements: MeshPlacements, each: int, sizes: Sequence[int]) -> bool:
    """Return whether every rank holds all elements of the rows that it holds."""
    row = RowShard(0, each)
    placements = [placement if placement == "R" else row.on(placement) for placement in elements]
    rows = layout.canonical((n // each,), placements, sizes)
    if rows is None:
        return False
    scaled = [layout.scaled(placement, each) for placement in rows]
    return layout.canonical((n,), scaled, sizes) == elements


def _is_placed(walk: Walk, node: Node, op: RowOp, elements: MeshPlacements) -> bool:
    """Return whether an op before the sort was placed on each rank's own elements."""
    replicated: Choice = (("R",) * len(op.ins), ("R",) * len(op.outs))
    by_axis = [replicated if placement == "R" else op.on(placement) for placement in elements]
    wanted = [list(zip(*side, strict=True)) for side in zip(*by_axis, strict=True)]
    steps = [s for s in walk.steps if s.node is node and isinstance(s, plan.Apply)]
    placements = [[[slot.placements for slot in slots] for slots in (s.ins, s.outs)] for s in steps]
    return bool(steps) and all(placed == wanted for placed in placements)
