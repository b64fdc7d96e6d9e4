"""The search for the ops of a loop that Python has unrolled."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection
from typing import Any

import attrs
import torch
from torch.fx import Graph, Node

from ...ops.nodes import args_of
from ...ops.placement import AFTER
from .. import rules
from .slices import Slices, gradient_of, slices_of

aten = torch.ops.aten

# Ops besides the elementwise ones that are batched.
BATCHED: set[Any] = {
    aten.mm.default,
    aten.bmm.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.cat.default,
    aten.sum.dim_IntList,
    aten.amax.default,
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten._softmax.default,
    aten._softmax_backward_data.default,
    AFTER,
    operator.getitem,
}
GRADIENTS = {aten.select_backward.default, aten.slice_backward.default}
JOINS = {aten.stack.default, aten.cat.default}
# Comparisons of integers with the number of the turn.
COMPARISONS: set[Any] = {aten.eq.Scalar, aten.ne.Scalar}
INTS = (torch.int32, torch.int64)

Summand = Node | float


@attrs.define(eq=False)
class Repeated:
    """One op of a loop, in all its turns.

    Args:
        nodes: of each turn. Several compute the same.
        slices: what it reads, if it reads slices that are no results of the loop.
        reads_sharded: whether it depends on slices that ranks hold different ones of.
    """

    nodes: list[list[Node]]
    slices: Slices | None
    reads_sharded: bool

    @property
    def all(self) -> list[Node]:
        """The op of each turn."""
        return [x for several in self.nodes for x in several]

    @property
    def is_gradient(self) -> bool:
        """Whether its results are gradients of slices."""
        return self.all[0].target in GRADIENTS


@attrs.frozen(eq=False)
class Sum:
    """Additions whose results nothing else reads, and the last one.

    Args:
        additions: in order.
        summands: tensors and numbers.
    """

    additions: list[Node]
    summands: list[Summand]


@attrs.define(eq=False)
class Loop:
    """The ops of a loop, and what reads the results of all turns.

    Args:
        turns: how many.
        at: for each node of a turn, its op and the number of the turn.
        sums: for each addition of results of several turns, the sum.
        joins: for a stack or cat of the results of all turns, the op of which.
    """

    turns: int
    at: dict[Node, tuple[Repeated, int]] = attrs.field(factory=dict)
    sums: dict[Node, Sum] = attrs.field(factory=dict)
    joins: dict[Node, Repeated] = attrs.field(factory=dict)

    @property
    def ops(self) -> list[Repeated]:
        return list(dict.fromkeys(op for op, _ in self.at.values()))

    def turns_of(self, values: Collection[Summand]) -> set[int]:
        """Return the turns of some nodes."""
        return {self.at[x][1] for x in values if isinstance(x, Node) and x in self.at}

    def is_sharded(self, x: Summand) -> bool:
        """Return whether a node is of an op that depends on slices that ranks hold different
        ones of.
        """
        return isinstance(x, Node) and x in self.at and self.at[x][0].reads_sharded

    def is_batched(self, op: Repeated) -> bool:
        """Return whether nothing needs the result of one turn alone, or ranks have it anyway."""
        return not op.reads_sharded or all(self.reads_all(op, y) for x in op.all for y in x.users)

    def reads_all(self, op: Repeated, reader: Node) -> bool:
        """Return whether a reader of one turn's result is of that turn, or reads all turns."""
        if reader in self.sums:
            return self.count(op, self.sums[reader]) > 0
        return reader in self.at or self.joins.get(reader) is op

    def count(self, op: Repeated, of: Sum) -> int:
        """Return how often the result of each turn is a summand; 0 if that differs."""
        ours = [x for x in of.summands if isinstance(x, Node) and x in self.at]
        times = Counter(self.at[x][1] for x in ours if self.at[x][0] is op)
        is_of_all = len(times) == self.turns and len(set(times.values())) == 1
        return times[0] if is_of_all else 0


class Search:
    """The search for the ops of a loop.

    Args:
        graph: of the program.
        turns: how many.
        sharded: the slices that ranks hold different ones of.
    """

    def __init__(self, graph: Graph, turns: int, sharded: Collection[Slices]) -> None:
        self.graph, self.turns, self.sharded = graph, turns, sharded
        self.sums = _sums(graph)
        self.same = _same(graph)
        self.outside: set[Node] = set()  # nodes that turned out to be no part of the loop
        self.ops: dict[Any, Repeated] = {}
        self.loop = Loop(turns)

    def run(self) -> Loop:
        """Leave out what cannot be batched, until everything that is left can be."""
        while True:
            self.match()
            ops = self.loop.ops
            bad = [op for op in ops if not all(op.nodes)]
            bad = bad or [op for op in ops if not self.loop.is_batched(op)]
            if not bad:
                return self.loop
            self.outside |= {x for op in bad for x in op.all}

    def match(self) -> None:
        """Match the ops of each turn with those of the others."""
        self.ops, self.loop = {}, Loop(self.turns)
        for node in self.graph.nodes:
            if node not in self.sums:
                self.place(node)
                continue
            whole = self.sums[node]
            if node is whole.additions[-1]:
                if len(self.loop.turns_of(whole.summands)) > 1:
                    self.loop.sums.update(dict.fromkeys(whole.additions, whole))
                else:
                    for addition in whole.additions:
                        self.place(addition)

    def place(self, node: Node) -> None:
        """Take a node as an op of a turn, if it is one."""
        at = self.loop.at
        found = self.key(node) if node.op == "call_function" and node not in self.outside else None
        if found is None:
            if node.target in JOINS:
                self.join(node)
            return
        key, turn, slices = found
        if key not in self.ops:
            is_sharded = slices in self.sharded or any(
                map(self.loop.is_sharded, node.all_input_nodes)
            )
            self.ops[key] = Repeated([[] for _ in range(self.turns)], slices, is_sharded)
        self.ops[key].nodes[turn].append(node)
        at[node] = self.ops[key], turn

    def join(self, node: Node) -> None:
        """Take a node as a stack or cat of all turns, in order, if it is one."""
        parts = [self.loop.at.get(x) for x in args_of(node)[0]]
        found = [part for part in parts if part is not None]
        is_whole = [turn for _, turn in found] == [*range(self.turns)] and len(found) == len(parts)
        if is_whole and len({op for op, _ in found}) == 1:
            self.loop.joins[node] = found[0][0]

    def key(self, node: Node) -> tuple[Any, int, Slices | None] | None:
        """Return what is equal for an op in all turns, its turn, and the slices that it reads."""
        at = self.loop.at
        inputs = [x for x in node.all_input_nodes if x in at]
        turns = self.loop.turns_of(inputs)
        if not turns:
            return self.first_key(node)
        is_readable = not any(at[x][0].is_gradient for x in inputs)
        if len(turns) > 1 or not is_readable or not _can_batch(node):
            return None
        (turn,) = turns
        name = lambda x: (id(at[x][0]),) if x in at else (self.same.get(x, x),)
        args = torch.fx.node.map_arg(node.args, name)
        kwargs = torch.fx.node.map_arg(node.kwargs, name)
        of = gradient_of(node)
        if of is not None:
            slices, number = of
            shape = args_of(node)[1]
            if number != turn or shape[slices.dim] != self.turns * (slices.width or 1):
                return None
            args = (args[0], shape, slices.dim, slices.width)
        return (node.target, repr(args), repr(kwargs)), turn, None

    def first_key(self, node: Node) -> tuple[Any, int, Slices | None] | None:
        """The same for an op that reads no result of the loop."""
        read = slices_of(node)
        if read is not None:
            slices, turn = read
            first = self.same.get(slices.source, slices.source)
            is_ours = slices.turns == self.turns
            return (attrs.evolve(slices, source=first), turn, slices) if is_ours else None
        if node.target not in COMPARISONS:
            return None
        x, number = args_of(node)
        is_turn = type(number) is int and number in range(self.turns)
        is_turn = is_turn and x.meta["val"].dtype in INTS
        return ((node.target, self.same.get(x, x)), number, None) if is_turn else None


def _can_batch(node: Node) -> bool:
    """Return whether an op of a turn can be batched."""
    if node.target in BATCHED or node.target in GRADIENTS:
        return True
    return _is_pure(node) and rules.is_pointwise(node.target)


def _is_pure(node: Node) -> bool:
    """Return whether a node is an op with the same results each time."""
    tags = getattr(node.target, "tags", None)
    return tags is not None and torch.Tag.nondeterministic_seeded not in tags


def _same(graph: Graph) -> dict[Node, Node]:
    """Return for each op the first one that computes the same."""
    found: dict[Node, Node] = {}
    first: dict[Any, Node] = {}
    for node in graph.nodes:
        if _is_pure(node):
            given = torch.fx.node.map_arg((node.args, node.kwargs), lambda x: found.get(x, x))
            found[node] = first.setdefault((node.target, repr(given)), node)
    return found


def _sums(graph: Graph) -> dict[Node, Sum]:
    """Return for each addition the sum that it is of."""
    sums: dict[Node, Sum] = {}  # by the last addition so far
    for node in graph.nodes:
        if not _is_addition(node):
            continue
        parts = [sums.pop(x, None) if _reads_alone(node, x) else None for x in node.args]
        earlier = [y for part in parts if part is not None for y in part.additions]
        summands: list[Any] = []
        for x, part in zip(node.args, parts, strict=True):
            summands += [x] if part is None else part.summands
        sums[node] = Sum([*earlier, node], summands)
    return {x: whole for whole in sums.values() for x in whole.additions}


def _reads_alone(node: Node, x: Any) -> bool:
    """Return whether nothing else reads an argument of a node, and it reads it once."""
    return isinstance(x, Node) and len(x.users) == 1 and node.args.count(x) == 1


def _is_addition(node: Node) -> bool:
    """Return whether an op adds a number, or a tensor of the same shape and dtype, to a floating
    tensor.
    """
    if node.target is not aten.add.Tensor or node.kwargs:
        return False
    values = [x.meta["val"] for x in (*node.args, node) if isinstance(x, Node)]
    kinds = {(tuple(x.shape), x.dtype) for x in values}
    return len(kinds) == 1 and (values[0].is_floating_point() or values[0].is_complex())
