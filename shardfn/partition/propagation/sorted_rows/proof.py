"""Which sorts may be done by each rank on its own rows: those of which no result tells the order
that the rows have while they are sorted.

Every op that reads a sorted row must either treat all rows alike, or be one of `special.TABLE`,
until the rows are put back or summed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch.fx import Graph, Node

from .... import _compat
from ....capture.drawing import draws
from ....ops.nodes import args_of
from ....ops.placement import AFTER
from ....types import PENDING, Mark
from ... import rules
from ...rule_api import registry
from ...rule_api.checked import answered
from ...rule_api.strategy import Choice, OpCall, named
from .elements import MOVES, is_constant_along, is_faithful
from .kinds import UNREAD, Kind, Member, Own, Role, Rows
from .special import PLACES, ROWS, TABLE, Reading

aten = torch.ops.aten
SORTS = {aten.sort.default, aten.sort.stable}


@attrs.frozen(eq=False)
class SortedRows:
    """A sort that each rank may do on its own rows.

    Args:
        root: the sort.
        members: the ops on sorted rows.
        earlier: those of them that the program has before the sort: what they make is the same
            on all ranks' rows, in some order.
    """

    root: Node
    members: dict[Node, Member]
    earlier: tuple[Node, ...]

    @property
    def elements(self) -> Node:
        """The elements that are sorted."""
        return args_of(self.root)[0]

    @property
    def each(self) -> list[int]:
        """The numbers of elements for each row of tensors that the members read and make."""
        roles = [r for m in self.members.values() for r in (*m.ins, *m.outs)]
        return sorted({role.each for role in roles if isinstance(role, Own)})


def sorted_rows(graph: Graph, name: str) -> dict[Node, SortedRows]:
    """The sorts of a graph that each rank may do on its own rows, by their nodes.

    Args:
        graph: the graph.
        name: of the program, for errors.
    """
    found: dict[Node, SortedRows] = {}
    owners: dict[Node, Node] = {}  # of members: the sort
    for root in graph.nodes:
        if root.target not in SORTS or root in owners:
            continue
        rows = _Search(root, name).rows(graph)
        if rows is None:
            continue
        others = [owners[x] for x in rows.members if x in owners]
        for other in others:
            found.pop(other, None)
        if not others:
            found[root] = rows
        owners.update(dict.fromkeys(rows.members, root))
    return found


class _Search:
    """One walk over a graph, from a sort on."""

    def __init__(self, root: Node, name: str) -> None:
        self.root = root
        self.name = name
        options = named(root.target, root.args, root.kwargs)
        self.elements: Node = options["self"]
        self.is_ascending = not options["descending"]
        self.members: dict[Node, Member] = {}
        # how results depend on the sort
        self.kinds: dict[Node, tuple[Kind, ...]] = {}

    def rows(self, graph: Graph) -> SortedRows | None:
        """The ops on sorted rows; None where some op tells their order."""
        if self.elements.meta["val"].dim() != 1:
            return None
        earlier: tuple[Node, ...] = ()
        for node in graph.nodes:
            if node is self.root:
                earlier = tuple(self.members)
                self.start()
            elif not self.follow(node):
                return None
        return SortedRows(self.root, self.members, earlier)

    def start(self) -> None:
        """Note the results of the sort: its elements, and their places before it."""
        kinds = Rows(0, is_key=self.is_ascending), PLACES
        self.members[self.root] = Member((ROWS,), (ROWS, ROWS), kinds)
        self.kinds[self.root] = kinds

    def kind(self, node: Node) -> Kind:
        """How a tensor depends on the sort."""
        kinds = self.kinds.get(node, (None,))
        return kinds[0]

    def follow(self, node: Node) -> bool:
        """Note how the result of a node depends on the sort. False where it tells the order of
        sorted rows.
        """
        if getattr(node.target, "__name__", "") == "getitem":
            source, number = args_of(node)
            several = self.kinds.get(source)
            if several is not None:
                self.kinds[node] = (several[number],)
            return True
        read: list[Node] = []
        torch.fx.node.map_arg((node.args, node.kwargs), read.append)
        kinds = [self.kind(x) for x in read]
        is_counted = node.target is aten.histc.default
        return not (is_counted or any(kinds)) or self.place(node, read, kinds)

    def place(self, node: Node, read: list[Node], kinds: list[Kind]) -> bool:
        """Note an op that reads what depends on the sort."""
        if node.target is AFTER:
            self.kinds[node] = (kinds[0],)
            return True
        if _makes_constant(node):
            return True
        member = self.member(node, read, kinds) if _is_op(node) else None
        if member is None:
            return not any(isinstance(kind, Rows) for kind in kinds)
        self.members[node] = member
        self.kinds[node] = tuple(_of_results(node, member))
        return True

    def member(
        self, node: Node, read: list[Node], kinds: list[Kind]
    ) -> Member | None:
        """The op as one on sorted rows; None if it is not."""
        call = _call(node, read)
        if call is None or draws(node) or _has_own_rule(node.target):
            return None
        reading = Reading(call, read, kinds, self.elements, self.is_ascending)
        proof = TABLE.get(node.target) or TABLE.get(rules.name_of(node.target))
        found = proof(reading) if proof else None
        return found or self.alike(node, reading)

    def alike(self, node: Node, reading: Reading) -> Member | None:
        """An op that treats all rows alike: it runs on any of them."""
        rows = [kind for kind in reading.kinds if isinstance(kind, Rows)]
        moves = node.target in MOVES and is_faithful(node)
        numbers = {kind.numbers for kind in rows if kind.numbers is not None}
        if not rows or UNREAD in numbers or (numbers and not moves):
            return None
        kept = rows[0] if moves else Rows(0)
        rule = rules.find(node.target)
        for choice in answered(rule, reading.call, self.name, node):
            is_alike = rules.takes_strided(reading.call, choice)
            if is_alike and _reads(reading, choice[0]):
                member = _member(reading, choice, kept)
                if member is not None:
                    return member
        return None


def _is_op(node: Node) -> bool:
    target = node.target
    is_op = isinstance(target, _compat.OpOverload)
    return is_op and _compat.namespace_of(target) != "shardfn"


def _makes_constant(node: Node) -> bool:
    """Whether an op only reads the shape and the dtype of a tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    return rules.fill_value(node.target, node.args, value.dtype) is not None


def _has_own_rule(target: object) -> bool:
    """Whether the user has registered a rule for an op."""
    return bool(registry.find(target) or registry.find(rules.PUBLIC.get(target)))


def _results(node: Node) -> tuple[Any, ...]:
    """The results of an op, tensors and others."""
    result = node.meta.get("val")
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _of_results(node: Node, member: Member) -> Iterator[Kind]:
    """How each result of an op depends on the sort."""
    feed = iter(member.kinds)
    for x in _results(node):
        yield next(feed) if isinstance(x, torch.Tensor) else None


def _call(node: Node, read: list[Node]) -> OpCall | None:
    """The call of an op of tensors."""
    ins = tuple(x.meta.get("val") for x in read)
    outs = tuple(x for x in _results(node) if isinstance(x, torch.Tensor))
    if not outs or not all(isinstance(x, torch.Tensor) for x in ins):
        return None
    return OpCall(node.target, node.args, dict(node.kwargs), ins, outs)


def _reads(reading: Reading, marks: tuple[Mark, ...]) -> bool:
    """Whether a strategy shards all sorted rows, and else only what is the same in all rows."""
    return all(
        mark == kind.dim
        if isinstance(kind, Rows)
        else _is_same(reading, node, mark)
        for mark, kind, node in zip(
            marks, reading.kinds, reading.nodes, strict=True
        )
    )


def _is_same(reading: Reading, node: Node, mark: Mark) -> bool:
    """Whether a tensor that does not depend on the sort may have a placement: replicated, or
    with the same elements in all rows.
    """
    if mark == "R":
        return True
    value = node.meta["val"]
    if mark == "sum":
        return rules.fill_value(node.target, node.args, value.dtype) == 0
    if not isinstance(mark, int):
        return False
    has_rows = value.shape[mark] == reading.n
    return has_rows and is_constant_along(node, mark)


def _member(reading: Reading, choice: Choice, kept: Rows) -> Member | None:
    """An op that treats all rows alike, by a strategy that shards them."""
    ins, outs = choice
    made = [_made(reading, *pair) for pair in zip(outs, reading.call.outs, strict=True)]
    if not all(made):
        return None
    kinds: list[Kind] = [
        attrs.evolve(kept, dim=role.dim) if isinstance(role, Own) else None
        for role in made
    ]
    roles = [Own(mark) if isinstance(mark, int) else str(mark) for mark in ins]
    return Member(tuple(roles), tuple(x for x in made if x), tuple(kinds))


def _made(reading: Reading, mark: Mark, x: torch.Tensor) -> Role | None:
    """Where a result is: with its rows, or a Partial reduction of them."""
    if isinstance(mark, int):
        return Own(mark) if x.shape[mark] == reading.n else None
    return mark if isinstance(mark, str) and mark in PENDING else None
