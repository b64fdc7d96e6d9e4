"""Sorted rows in a walk: where the sorted elements are sharded, each rank sorts its own."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from ....types import Marks
from ... import layout, plan, rules
from ...rule_api.checked import answered
from ..values import Value
from ..walk import Walk
from .kinds import Own, OwnRows, Role, SortedRows, marks_of
from .proof import sorted_rows


def sort(walk: Walk, node: Node) -> None:
    """Place a sort: as one on each rank's own rows if all results allow it, else by its rule."""
    begin(walk, node)
    if node in walk.own_rows:
        place(walk, node)
    else:
        walk.apply(node)


def begin(walk: Walk, node: Node) -> None:
    """At a sort: find out whether ranks sort their own rows, and note the ops on them."""
    graph = node.graph
    if graph not in walk.sorts:
        walk.sorts[graph] = sorted_rows(graph, walk.name)
    rows = walk.sorts[graph].get(node)
    if rows is None:
        return
    elements = _elements(walk, rows, node)
    if elements is None:
        return
    for other, member in rows.members.items():
        if other not in rows.earlier:
            walk.own_rows[other] = OwnRows(member, elements)


def _elements(walk: Walk, rows: SortedRows, node: Node) -> Marks | None:
    """The placements of the sorted elements; None where they are not sharded, or cannot stay
    so.
    """
    value: Value = walk.values[rows.elements]
    phase = node.meta.get("phase", "forward")
    held = value.readable(phase)
    if value.varies or not held:
        return None
    first = held[0].marks
    elements = tuple(mark if layout.split(mark) else "R" for mark in first)
    is_sharded = any(mark != "R" for mark in elements)
    if not is_sharded or any(any(layout.halo(mark)) for mark in elements):
        return None
    for each in rows.each:
        if not _divides(walk, value, elements, each):
            return None
    for other in rows.earlier:
        own = OwnRows(rows.members[other], elements)
        if not _is_placed(walk, other, own):
            return None
    return elements


def _divides(walk: Walk, value: Value, elements: Marks, each: int) -> bool:
    """Whether a rank that has some rows has all elements of these rows."""
    (n,) = value.fake.shape
    sizes = walk.axes.sizes
    row = Own(0, each)
    own = [mark if mark == "R" else row.mark(mark) for mark in elements]
    rows = layout.canonical((n // each,), own, sizes)
    if rows is None:
        return False
    again = [layout.scaled(mark, each) for mark in rows]
    return layout.canonical((n,), again, sizes) == elements


def _is_placed(walk: Walk, node: Node, own: OwnRows) -> bool:
    """Whether an op before the sort is placed as one on each rank's own elements, which it
    counts.
    """
    ins = _on_all(own.member.ins, own.elements)
    outs = _on_all(own.member.outs, own.elements)
    found = False
    for step in walk.steps:
        if step.node is not node or not isinstance(step, plan.Apply):
            continue
        found = True
        if [slot.marks for slot in step.ins] != ins:
            return False
        if [slot.marks for slot in step.outs] != outs:
            return False
    return found


def _on_all(roles: Sequence[Role], elements: Marks) -> list[Marks]:
    """The placements of tensors on all axes, with nothing sharded on those that do not shard
    the elements.
    """
    whole = ("R",) * len(roles)
    axes = [whole if mark == "R" else marks_of(roles, mark) for mark in elements]
    return list(zip(*axes, strict=True))


def place(walk: Walk, node: Node) -> None:
    """Place an op on sorted rows: on each axis that shards the elements, ranks have their own."""
    own = walk.own_rows[node]
    call, values = walk.call(node)
    rule = rules.find(call.target)
    strategies = answered(rule, call, walk.name, node)
    placed = walk.weigh(
        call, values, node, [choice for choice in strategies if own.keeps(choice)], own.fixed
    )
    walk.take(node, call, values, placed, own.member.local)
