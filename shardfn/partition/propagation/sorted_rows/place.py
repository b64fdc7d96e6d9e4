"""Sorted rows in a walk: where the sorted elements are sharded, each rank sorts its own."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
from torch.fx import Node

from ....types import Mark, Marks
from ... import layout, plan, rules
from ...protocols import Walk
from ...rule_api.checked import answered
from ...rule_api.strategy import Choice
from ..values import Value
from .kinds import Member, Own, Role
from .proof import SORTS, SortedRows, sorted_rows


@attrs.frozen(eq=False)
class OwnRows:
    """An op that a rank runs on its own rows.

    Args:
        member: the op.
        elements: the placements of the sorted elements.
    """

    member: Member
    elements: Marks

    @property
    def fixed(self) -> dict[int, Choice]:
        """The strategy on each axis that shards the elements."""
        return {
            axis: (_marks(self.member.ins, mark), _marks(self.member.outs, mark))
            for axis, mark in enumerate(self.elements)
            if mark != "R"
        }

    def keeps(self, choice: Choice) -> bool:
        """Whether a strategy for another axis shards no rows."""
        ins, outs = choice
        pairs = [
            *zip(self.member.ins, ins, strict=True),
            *zip(self.member.outs, outs, strict=True),
        ]
        return all(_is_free(role, mark) for role, mark in pairs)


def _marks(roles: Iterable[Role], elements: Mark) -> tuple[Mark, ...]:
    return tuple(
        role.mark(elements) if isinstance(role, Own) else role for role in roles
    )


def _is_free(role: Role, mark: Mark) -> bool:
    return not isinstance(role, Own) or not layout.shards(mark, role.dim)


def begin(walk: Walk, node: Node) -> None:
    """At a sort: find out whether ranks sort their own rows, and note the ops on them."""
    if node.target not in SORTS or node in walk.own_rows:
        return
    if node.graph not in walk.sorts:
        walk.sorts[node.graph] = sorted_rows(node.graph, walk.name)
    rows = walk.sorts[node.graph].get(node)
    elements = _elements(walk, rows, node) if rows else None
    if rows is None or elements is None:
        return
    for other, member in rows.members.items():
        if other not in rows.earlier:
            walk.own_rows[other] = OwnRows(member, elements)


def _elements(walk: Walk, rows: SortedRows, node: Node) -> Marks | None:
    """The placements of the sorted elements; None where they are not sharded, or cannot stay
    so.
    """
    value: Value = walk.values[rows.elements]
    held = value.readable(node.meta.get("phase", "forward"))
    if value.varies or not held:
        return None
    marks = [m if layout.split(m) else "R" for m in held[0].marks]
    is_sharded = any(mark != "R" for mark in marks)
    has_halo = any(any(layout.halo(mark)) for mark in marks)
    elements = tuple(marks)
    if not is_sharded or has_halo:
        return None
    fit = all(_divides(walk, value, elements, each) for each in rows.each)
    counted = all(
        _is_placed(walk, x, OwnRows(rows.members[x], elements)) for x in rows.earlier
    )
    return elements if fit and counted else None


def _divides(walk: Walk, value: Value, elements: Marks, each: int) -> bool:
    """Whether a rank that has some rows has all elements of these rows."""
    (n,) = value.fake.shape
    sizes = walk.axes.sizes
    own = [m if m == "R" else Own(0, each).mark(m) for m in elements]
    rows = layout.canonical((n // each,), own, sizes)
    if rows is None:
        return False
    again = [layout.scaled(mark, each) for mark in rows]
    return layout.canonical((n,), again, sizes) == elements


def _is_placed(walk: Walk, node: Node, own: OwnRows) -> bool:
    """Whether an op before the sort is placed as one of each rank's own elements: they are
    counted, a Partial sum.
    """
    wanted = [
        _on_all(roles, own.elements) for roles in (own.member.ins, own.member.outs)
    ]
    steps = [
        step
        for step in walk.steps
        if isinstance(step, plan.Apply) and step.node is node
    ]
    return bool(steps) and all(
        [slot.marks for slot in slots] == marks
        for step in steps
        for slots, marks in zip((step.ins, step.outs), wanted, strict=True)
    )


def _on_all(roles: Iterable[Role], elements: Marks) -> list[Marks]:
    """The placements of tensors on all axes, with nothing sharded on those that do not shard
    the elements.
    """
    return [
        tuple(m if m == "R" else _marks([role], m)[0] for m in elements)
        for role in roles
    ]


def place(walk: Walk, node: Node) -> None:
    """Place an op on sorted rows: on each axis that shards the elements, ranks have their own."""
    own: OwnRows = walk.own_rows[node]
    call, values = walk.call(node)
    rule = rules.find(call.target)
    strategies = answered(rule, call, walk.name, node)
    free = [choice for choice in strategies if own.keeps(choice)]
    placed = walk.weigh(call, values, node, free, own.fixed)
    walk.take(node, call, values, placed, own.member.local)
