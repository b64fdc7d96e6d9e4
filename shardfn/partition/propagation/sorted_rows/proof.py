"""Which sorts may be done by each rank on its own rows: those of which no result tells the order
that the rows have while they are sorted.

Every op that reads a sorted row must either treat all rows alike, or be one of `special.TABLE`,
until the rows are put back or summed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import torch
from torch.fx import Graph, Node

from .... import _compat
from ....capture.drawing import draws
from ....ops.nodes import args_of
from ....ops.placement import AFTER
from ....types import PENDING, Mark, Marks
from ... import rules
from ...rule_api.checked import answered
from ...rule_api.strategy import Choice, arguments, call_of, named
from .elements import MOVES, is_constant_along, is_faithful, is_item
from .kinds import PLACES, ROWS, UNREAD, Kind, Member, Own, Reading, Role, Rows, SortedRows
from .special import TABLE

aten = torch.ops.aten
SORTS: set[object] = {aten.sort.default, aten.sort.stable}


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
        for member in rows.members:
            owners[member] = root
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
        return SortedRows(self.elements, self.members, earlier)

    def start(self) -> None:
        """Note the results of the sort: its elements, and their places before it."""
        keys = Rows(dim=0, is_key=self.is_ascending)
        self.note(self.root, Member(ins=(ROWS,), outs=(ROWS, ROWS), kinds=(keys, PLACES)))

    def note(self, node: Node, member: Member) -> None:
        """Note an op on sorted rows."""
        self.members[node] = member
        self.kinds[node] = tuple(_of_results(node, member))

    def follow(self, node: Node) -> bool:
        """Note how the result of a node depends on the sort. False where it tells the order of
        sorted rows.
        """
        if is_item(node):
            self.item(node)
            return True
        read = arguments(node)
        kinds = [self.kinds.get(x, (None,))[0] for x in read]
        if node.target is AFTER:
            self.kinds[node] = tuple(kinds[:1])
            return True
        is_counted = node.target is aten.histc.default
        if not is_counted and not any(kinds):
            return True
        if _makes_constant(node):
            return True
        member = self.member(node, read, kinds)
        if member is not None:
            self.note(node, member)
            return True
        return not any(isinstance(kind, Rows) for kind in kinds)

    def item(self, node: Node) -> None:
        """Note one of the results of an op."""
        source, number = args_of(node)
        several = self.kinds.get(source)
        if several is not None:
            self.kinds[node] = (several[number],)

    def member(self, node: Node, read: list[Node], kinds: list[Kind]) -> Member | None:
        """The op as one on sorted rows; None if it is not."""
        if not _is_op(node) or draws(node) or rules.of_user(node.target) is not None:
            return None
        call = call_of(node)
        if call is None:
            return None
        reading = Reading(
            call=call, nodes=read, kinds=kinds, ids=self.elements, is_ascending=self.is_ascending
        )
        proof = TABLE.get(node.target) or TABLE.get(rules.name_of(node.target))
        found = proof(reading) if proof else None
        return found or self.alike(node, reading)

    def alike(self, node: Node, reading: Reading) -> Member | None:
        """An op that treats all rows alike: it runs on any of them."""
        moves = node.target in MOVES and is_faithful(node)
        kept = _kept(reading.kinds, moves=moves)
        if kept is None:
            return None
        call = reading.call
        rule = rules.find(node.target)
        for choice in answered(rule, call, self.name, node):
            if not rules.takes_strided(call, choice):
                continue
            if not _reads(reading, choice[0]):
                continue
            member = _member(reading, choice, kept)
            if member is not None:
                return member
        return None


def _kept(kinds: Sequence[Kind], *, moves: bool) -> Rows | None:
    """How the result of an op that treats all rows alike depends on the sort. None if it reads
    no rows, or numbers that it does not only move.
    """
    rows = [kind for kind in kinds if isinstance(kind, Rows)]
    if not rows:
        return None
    for kind in rows:
        if kind.numbers == UNREAD:
            return None
        if kind.numbers is not None and not moves:
            return None
    return rows[0] if moves else Rows(0)


def _is_op(node: Node) -> bool:
    """Whether a node is an op of tensors that is not a prim."""
    target = node.target
    if not isinstance(target, _compat.OpOverload):
        return False
    return _compat.namespace_of(target) != "shardfn"


def _makes_constant(node: Node) -> bool:
    """Whether an op only reads the shape and the dtype of a tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    filled = rules.fill_value(node.target, node.args, value.dtype)
    return filled is not None


def _of_results(node: Node, member: Member) -> Iterator[Kind]:
    """How each result of an op depends on the sort."""
    feed = iter(member.kinds)
    result = node.meta.get("val")
    for x in result if isinstance(result, (tuple, list)) else (result,):
        yield next(feed) if isinstance(x, torch.Tensor) else None


def _reads(reading: Reading, marks: Marks) -> bool:
    """Whether a strategy shards all sorted rows, and else only what is the same in all rows."""
    for mark, kind, node in zip(marks, reading.kinds, reading.nodes, strict=True):
        if isinstance(kind, Rows):
            if mark != kind.dim:
                return False
        elif not _is_same(reading, node, mark):
            return False
    return True


def _is_same(reading: Reading, node: Node, mark: Mark) -> bool:
    """Whether a tensor that does not depend on the sort may have a placement: replicated, or
    with the same elements in all rows.
    """
    if mark == "R":
        return True
    value = node.meta["val"]
    if mark == "sum":
        return rules.fill_value(node.target, node.args, value.dtype) == 0
    if not isinstance(mark, int) or value.shape[mark] != reading.n:
        return False
    return is_constant_along(node, mark)


def _member(reading: Reading, choice: Choice, kept: Rows) -> Member | None:
    """An op that treats all rows alike, by a strategy that shards them."""
    made: list[Role] = []
    kinds: list[Kind] = []
    for mark, x in zip(choice[1], reading.call.outs, strict=True):
        if isinstance(mark, int) and x.shape[mark] == reading.n:
            made.append(Own(mark))
            kinds.append(attrs.evolve(kept, dim=mark))
        elif isinstance(mark, str) and mark in PENDING:
            made.append(mark)
            kinds.append(None)
        else:
            return None
    return Member(
        ins=tuple(_role(mark) for mark in choice[0]), outs=tuple(made), kinds=tuple(kinds)
    )


def _role(mark: Mark) -> Role:
    return Own(mark) if isinstance(mark, int) else str(mark)
