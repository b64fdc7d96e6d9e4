"""Rows that read the slices of their experts by unsorted numbers: `torch.bmm(rows, w[ids])`.

Rows keep the order of their tokens, so no proof about their order is needed: an op that needs each
row alone gives the same at the tokens and at the experts. This is the search for such ops around
the lookups by the same numbers. Which of them run at the experts is chosen in experts.py.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import torch
from torch.fx import Graph, Node

from ...ops.nodes import args_of
from ...ops.placement import AFTER
from .. import rules
from ..rule_api.check_strategies import strategies_of
from ..rule_api.strategy import arguments
from .local_sorts import (
    INTS,
    KEYS,
    MOVES,
    Kind,
    LocalSort,
    Reading,
    RowOp,
    Rows,
    RowShard,
    arguments_of,
    call_on_rows,
    is_constant_along,
    lookup,
    original,
    result_of,
    results,
    row_by_row,
)

aten = torch.ops.aten
LOOKUPS = (aten.index.Tensor, aten.index_select.default)
READS = {*LOOKUPS, aten.index_put.default}  # ops that read slices by numbers, or add to them
Numbers = Node | tuple[object, ...]
MATRICES = 3  # dims of weights with a matrix for each expert


def unsorted_rows(graph: Graph, name: str) -> dict[Node, LocalSort]:
    """Find the rows of a graph that read the matrices of their experts by unsorted numbers.

    Args:
        graph: the graph.
        name: of the program, for errors.

    Returns:
        By the first lookup of the same numbers: the numbers, and the ops on their rows.
    """
    found: dict[Node, LocalSort] = {}
    seen: set[Numbers] = set()
    members: set[Node] = set()
    for node in graph.nodes:
        numbers = _numbers(node)
        if numbers is None or _same(numbers) in seen or node in members:
            continue
        seen.add(_same(numbers))
        rows = _Search(node, numbers, members, name).run(graph)
        if rows is not None:
            found[node] = rows
            members |= {x for x, op in rows.ops.items() if op.ins}
    return found


def _numbers(node: Node) -> Node | None:
    """Return the numbers by which a node reads the matrices of experts; None for other ops."""
    if node.target not in LOOKUPS or args_of(node)[0].meta["val"].dim() < MATRICES:
        return None
    read = [x for x in arguments(node)[1:] if x.meta["val"].dtype in INTS]
    is_row = len(read) == 1 and read[0].meta["val"].dim() == 1
    return original(read[0]) if is_row else None


def _same(x: Node) -> Numbers:
    """Return what is equal for two tensors that are the same views of one."""
    x = original(x)
    if x.target not in MOVES or len(x.all_input_nodes) > 1:
        return x
    source, *options = args_of(x)
    return x.target, str(options), str(x.kwargs), _same(source)


class _Search:
    """A search for the ops on rows that read slices by the same numbers.

    Args:
        first: the first lookup by the numbers.
        numbers: one for each row.
        others: the ops on other rows.
        name: of the program, for errors.
    """

    def __init__(self, first: Node, numbers: Node, others: set[Node], name: str) -> None:
        self.first, self.numbers, self.others, self.name = first, numbers, others, name
        self.same = _same(numbers)
        (self.count,) = numbers.meta["val"].shape
        self.ops: dict[Node, RowOp] = {}
        self.kinds: dict[Node, tuple[Kind, ...]] = {}  # of the results of each node

    def run(self, graph: Graph) -> LocalSort | None:
        """Run the search. Returns None where no row reads a slice."""
        nodes = list(graph.nodes)
        nodes = nodes[nodes.index(self.first) :]
        for node in nodes:
            self.follow(node)
        later = set(nodes)
        for node in reversed(nodes):
            if node in self.ops:
                self.precede(node, later)
        if not self.ops:
            return None
        in_order = {x: self.ops[x] for x in nodes if x in self.ops}
        kinds: dict[Node, Kind] = {x: Rows(0, KEYS) for node in nodes for x in self.keys(node)}
        tokens = dict(self.tokens(in_order))
        return LocalSort(self.numbers, {**tokens, **in_order}, (), kinds)

    # Forward: what reads rows of experts

    def keys(self, node: Node) -> Iterator[Node]:
        """Yield the argument of an op on rows that has the numbers."""
        if node in self.ops and node.target in READS:
            yield from filter(self.are_numbers, arguments(node))

    def are_numbers(self, x: Node) -> bool:
        """Return whether a tensor has the numbers of the rows."""
        return x.meta["val"].dim() == 1 and _same(x) == self.same

    def follow(self, node: Node) -> None:
        """Note a node if it is an op on rows of experts."""
        if node.op != "call_function" or node in self.others:
            return
        if node.target in (AFTER, operator.getitem):
            source, number = args_of(node)
            own = self.kinds.get(source, ())
            self.kinds[node] = own[:1] if node.target is AFTER else own[number : number + 1]
            return
        kinds = {x: self.kind(x) for x in arguments(node)}
        is_lookup = node.target in READS and any(map(self.are_numbers, kinds))
        if not is_lookup and not any(kinds.values()):
            return
        op = self.of_groups(node, kinds) if is_lookup else self.row_op(node, kinds)
        if op is not None:
            self.note(node, op)

    def note(self, node: Node, op: RowOp) -> None:
        """Record an op on rows, and the kind of each of its results."""
        self.ops[node] = op
        kinds = iter(op.kinds)
        several = results(node)
        self.kinds[node] = tuple(
            next(kinds) if isinstance(x, torch.Tensor) else None for x in several
        )

    def kind(self, x: Node) -> Kind:
        """Return the kind of a tensor: with rows, or None."""
        return next(iter(self.kinds.get(x, ())), None)

    def of_groups(self, node: Node, kinds: dict[Node, Kind]) -> RowOp | None:
        """Accept a lookup by the numbers, or rows that are added to slices."""
        call = call_on_rows(node)
        if call is None:
            return None
        numbered = {x: Rows(0, KEYS) if self.are_numbers(x) else kinds[x] for x in kinds}
        if node.target is aten.index_put.default:
            self.may_have_rows(node, numbered)
        op = lookup(Reading(call, numbered, self.numbers, False, is_sorted=False))
        return op if op is not None and op.reads_keys else None

    def may_have_rows(self, node: Node, kinds: dict[Node, Kind]) -> None:
        """Note that what is added to slices has rows, as every tensor of so many in a dim."""
        _, indices, values = args_of(node)[:3]
        dims = [d for d, at in enumerate(indices) if at is not None]
        if isinstance(values, Node) and kinds[values] is None and len(dims) == 1:
            shape = values.meta["val"].shape
            if dims[0] < len(shape) and shape[dims[0]] == self.count:
                kinds[values] = Rows(dims[0])

    def row_op(self, node: Node, kinds: dict[Node, Kind]) -> RowOp | None:
        """Accept an op that needs each row alone."""
        call = call_on_rows(node)
        if call is None:
            return None
        reading = Reading(call, kinds, self.numbers, False, is_sorted=False)
        op = row_by_row(node, reading, self.name)
        return op if op is not None and op.is_row_by_row else None

    # Backward: what makes rows that they read

    def precede(self, node: Node, later: set[Node]) -> None:
        """Note the ops that make the rows of one, if they too need each row alone.

        Args:
            node: an op on rows.
            later: the nodes from the first lookup on.
        """
        for x, role in self.rows_of(node):
            source = original(x)
            is_free = source in later and source not in self.ops and source not in self.others
            if is_free and not is_constant_along(source, role.dim):
                op = self.op_above(source, role.dim)
                if op is not None:
                    self.note(source, op)

    def rows_of(self, node: Node) -> Iterator[tuple[Node, RowShard]]:
        """Yield the arguments of an op that have rows."""
        for x, role in zip(arguments(node), self.ops[node].ins, strict=True):
            if isinstance(role, RowShard) and not self.are_numbers(x):
                yield x, role

    def op_above(self, node: Node, dim: int) -> RowOp | None:
        """Accept an op of rows alone, all of the tokens, whose result has them along a dim."""
        call = call_on_rows(node)
        if call is None or node.target in READS or not isinstance(node.meta["val"], torch.Tensor):
            return None
        for ins, outs in strategies_of(rules.find(node.target), call, self.name, node):
            if outs != (dim,) or not rules.takes_strided(call, (ins, outs)):
                continue
            read = arguments_of(call)
            if read and self.are_rows(read, ins):
                return RowOp(
                    tuple(RowShard(m) if isinstance(m, int) else str(m) for m in ins),
                    (RowShard(dim),),
                    (Rows(dim),),
                    is_row_by_row=True,
                )
        return None

    def are_rows(self, read: Sequence[Node], placements: Sequence[object]) -> bool:
        """Return whether a strategy shards the rows of all arguments, but for single numbers."""
        for x, m in zip(read, placements, strict=True):
            shape = x.meta["val"].shape
            has_rows = isinstance(m, int) and shape[m] == self.count
            is_fitting = self.kind(x) in (None, Rows(m)) if isinstance(m, int) else False
            is_number = m == "R" and not shape
            if not is_number and not (has_rows and is_fitting):
                return False
        return True

    # Values at the tokens

    def tokens(self, ops: dict[Node, RowOp]) -> Iterator[tuple[Node, RowOp]]:
        """Yield what makes rows at the tokens that ops on rows read, for the bytes that it sends:
        ops without arguments, which stay.
        """
        roles: dict[Node, dict[int, RowShard]] = {}
        for node in ops:
            for x, role in self.rows_of(node):
                source, number = result_of(x)
                if source not in ops and not is_constant_along(x, role.dim):
                    roles.setdefault(source, {})[number] = role
        for source, by_number in roles.items():
            made = [i for i, x in enumerate(results(source)) if isinstance(x, torch.Tensor)]
            outs = [by_number.get(i, "R") for i in made]
            kinds = [Rows(r.dim) if isinstance(r, RowShard) else None for r in outs]
            yield source, RowOp((), tuple(outs), tuple(kinds))
