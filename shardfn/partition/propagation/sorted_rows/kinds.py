"""The records of sorted rows: how values depend on the sort, and where ranks have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
from torch.fx import Node

from ....types import Mark, Marks
from ... import layout
from ...rule_api.strategy import Choice, OpCall, named

POSITIONS = 0  # numbers of places among the sorted rows
UNREAD = -1  # numbers that no op may read


@attrs.frozen
class Rows:
    """A tensor with one row for each sorted element, in the order of the sort.

    Args:
        dim: of the rows.
        is_key: whether these are the sorted elements.
        numbers: k, where its elements are the places that the rows had before the sort, divided
            by k. POSITIONS for the inverse: its rows are in the order before the sort, and
            its elements are places among the sorted rows. None for other elements.
    """

    dim: int
    is_key: bool = False
    numbers: int | None = None


@attrs.frozen
class Groups:
    """How many elements of the sort have each value, or where the rows of each value end.

    Args:
        are_ends: which of them.
    """

    are_ends: bool


Kind = Rows | Groups | None


@attrs.frozen
class Own:
    """A tensor of which a rank has the rows of its shard of the sorted elements.

    Args:
        dim: of the rows.
        each: the number of elements for each row.
    """

    dim: int
    each: int = 1

    def mark(self, elements: Mark) -> Mark:
        """The placement on one axis, given that of the elements."""
        _, unit = layout.cut_of(elements)
        runs = unit // self.each if unit % self.each == 0 else 1
        return layout.joined(self.dim, runs, outer=layout.outer_of(elements))


Role = Own | str  # or the placement itself
ROWS = Own(0)
PLACES = Rows(dim=0, numbers=1)
INVERSE = Rows(dim=0, numbers=POSITIONS)


@attrs.frozen(eq=False)
class Member:
    """An op on sorted rows: where its tensors are on the axes that shard the elements.

    Args:
        ins: of its tensor arguments.
        outs: of its results.
        kinds: of its results.
        local: how a rank runs it on its own rows. None for the way of other shards.
    """

    ins: tuple[Role, ...]
    outs: tuple[Role, ...]
    kinds: tuple[Kind, ...]
    local: Callable[..., Any] | None = None


@attrs.frozen(eq=False)
class Reading:
    """An op, and how its tensor arguments depend on a sort.

    Args:
        call: the op.
        nodes: its tensor arguments.
        kinds: of these.
        ids: the node of the sorted elements.
        is_ascending: whether the least of them comes first.
    """

    call: OpCall
    nodes: Sequence[Node]
    kinds: Sequence[Kind]
    ids: Node
    is_ascending: bool

    @property
    def n(self) -> int:
        """The number of sorted elements."""
        (n,) = self.ids.meta["val"].shape
        return n

    @property
    def values(self) -> dict[str, Any]:
        """The arguments by name."""
        call = self.call
        return named(call.target, call.args, call.kwargs)

    def kind(self, node: Node) -> Kind:
        """How an argument depends on the sort."""
        for x, kind in zip(self.nodes, self.kinds, strict=True):
            if x is node:
                return kind
        return None

    def ins(self, roles: dict[Node, Role]) -> tuple[Role, ...]:
        """Where the arguments are: replicated, but for some."""
        return tuple(roles.get(x, "R") for x in self.nodes)

    def fits(self, node: Node, row: Own) -> bool:
        """Whether a tensor has a row for so many elements."""
        shape = node.meta["val"].shape
        if row.dim >= len(shape):
            return False
        return shape[row.dim] * row.each == self.n


Proof = Callable[[Reading], Member | None]


@attrs.frozen(eq=False)
class SortedRows:
    """A sort that each rank may do on its own rows.

    Args:
        elements: those that are sorted.
        members: the ops on sorted rows.
        earlier: those of them that the program has before the sort, which count the elements.
    """

    elements: Node
    members: dict[Node, Member]
    earlier: tuple[Node, ...]

    @property
    def each(self) -> list[int]:
        """The numbers of elements for each row of tensors that the members read and make."""
        found: set[int] = set()
        for member in self.members.values():
            for role in (*member.ins, *member.outs):
                if isinstance(role, Own):
                    found.add(role.each)
        return sorted(found)


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
        found: dict[int, Choice] = {}
        for axis, mark in enumerate(self.elements):
            if mark != "R":
                ins = marks_of(self.member.ins, mark)
                outs = marks_of(self.member.outs, mark)
                found[axis] = ins, outs
        return found

    def keeps(self, choice: Choice) -> bool:
        """Whether a strategy for another axis shards no rows."""
        ins, outs = choice
        roles = (*self.member.ins, *self.member.outs)
        for role, mark in zip(roles, (*ins, *outs), strict=True):
            if isinstance(role, Own) and layout.shards(mark, role.dim):
                return False
        return True


def marks_of(roles: Sequence[Role], elements: Mark) -> tuple[Mark, ...]:
    """The placements of tensors on an axis that shards the elements so."""
    found: list[Mark] = []
    for role in roles:
        mark = role.mark(elements) if isinstance(role, Own) else role
        found.append(mark)
    return tuple(found)
