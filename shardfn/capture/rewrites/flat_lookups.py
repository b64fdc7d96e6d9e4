"""Lookups of matrices by numbers of several dims, as `x[:, None, None] @ w[ids]` reads them, by a
flat list of numbers. The matrix product merges these dims anyway; merged before, each row of the
list is one of the product, and of the ops on single elements that follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch.fx import Graph, Node

from ...ops.nodes import args_of

aten = torch.ops.aten
VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
FILLS = {aten.full.default, aten.full_like.default}
MATRICES = 3  # dims of a tensor of matrices


def flatten_lookups(graph: Graph) -> None:
    """Replace lookups of matrices whose numbers have several dims, those of vectors by the same
    numbers, and what adds to such tensors. What is then unread stays in the graph.
    """
    lookups = graph.find_nodes(op="call_function", target=aten.index.Tensor)
    lists: dict[Node, list[Node]] = {}
    for node in lookups:
        numbers = _numbers(node)
        if numbers is not None:
            lists.setdefault(numbers, []).append(node)
    for numbers, nodes in lists.items():
        rows = _Rows(graph, numbers)
        of_products = [node for node in nodes if rows.is_of_products(node)]
        if of_products:
            for node in nodes:
                if node in of_products or args_of(node)[0].meta["val"].dim() < MATRICES:
                    rows.look_up(node)
            rows.follow()


def _numbers(node: Node) -> Node | None:
    """Return the numbers of a lookup along the first dim, if they have several dims; None for
    another lookup.
    """
    _, (numbers, *others) = args_of(node)[:2]
    if not isinstance(numbers, Node) or any(other is not None for other in others):
        return None
    value = numbers.meta["val"]
    is_list = value.dtype in (torch.int32, torch.int64) and value.dim() > 1
    return numbers if is_list and all(isinstance(n, int) for n in value.shape) else None


def _is_same(node: Node) -> bool:
    """Return whether an op is a view of the same shape."""
    if node.target not in (*VIEWS, aten.expand.default):
        return False
    return args_of(node)[0].meta["val"].shape == node.meta["val"].shape


def _number(x: Node) -> Any:
    """Return the number that a tensor is filled with; None for another tensor."""
    if x.target is aten.copy.default:
        return _number(args_of(x)[1])
    return args_of(x)[1] if x.target in FILLS else None


# Ops on the dims after those of the rows: their arguments for so many dims fewer before.


def _dim(x: torch.Tensor, dims: int, dim: int, *others: Any) -> tuple[Any, ...] | None:
    at = dim % x.dim() - dims
    return (at + 1, *others) if at >= 0 else None


def _new_dim(x: torch.Tensor, dims: int, dim: int) -> tuple[Any, ...] | None:
    at = dim % (x.dim() + 1) - dims
    return (at + 1,) if at >= 0 else None


def _two_dims(x: torch.Tensor, dims: int, a: int, b: int) -> tuple[Any, ...] | None:
    places = [dim % x.dim() - dims for dim in (a, b)]
    return tuple(at + 1 for at in places) if min(places) >= 0 else None


def _list(x: torch.Tensor, dims: int, order: list[int]) -> tuple[Any, ...] | None:
    places = [dim % x.dim() - dims for dim in order]
    return ([at + 1 for at in places],) if min(places, default=0) >= 0 else None


def _order(x: torch.Tensor, dims: int, order: list[int]) -> tuple[Any, ...] | None:
    order = [dim % x.dim() for dim in order]
    is_kept = order[:dims] == [*range(dims)]
    return ([0, *(dim - dims + 1 for dim in order[dims:])],) if is_kept else None


DIMS: dict[Any, Callable[..., tuple[Any, ...] | None]] = {
    aten.unsqueeze.default: _new_dim,
    aten.squeeze.dim: _dim,
    aten.squeeze.dims: _list,
    aten.select.int: _dim,
    aten.transpose.int: _two_dims,
    aten.permute.default: _order,
}


@attrs.define(eq=False)
class _Rows:
    """The rows of one list of numbers.

    Args:
        graph: of the program.
        numbers: of several dims.
        flat: the same as a list, once something reads it.
    """

    graph: Graph
    numbers: Node
    flat: Node | None = None

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(self.numbers.meta["val"].shape)

    def merged(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape of rows whose dims are merged; None for a tensor of no such rows."""
        count = len(self.dims)
        if tuple(shape[:count]) != self.dims:
            return None
        return (math.prod(self.dims), *shape[count:])

    def merges(self, node: Node) -> bool:
        """Return whether an op is a view that merges the dims of rows, and nothing else."""
        if node.target not in VIEWS:
            return False
        return tuple(node.meta["val"].shape) == self.merged(args_of(node)[0].meta["val"].shape)

    def flat_of(self, x: Any) -> Node | None:
        """Return the rows that a tensor is a view of, whose dims are not merged; None for another
        tensor.
        """
        while isinstance(x, Node) and x.op == "call_function" and _is_same(x):
            x = args_of(x)[0]
        if not isinstance(x, Node) or x.target not in VIEWS:
            return self.filled(x) if isinstance(x, Node) else None
        source = args_of(x)[0]
        shape = self.merged(x.meta["val"].shape)
        return source if tuple(source.meta["val"].shape) == shape else None

    def filled(self, x: Node) -> Node | None:
        """Return merged rows that are filled with the number of a tensor; None for another one."""
        number = _number(x)
        if number is None:
            return None
        value = x.meta["val"]
        shape = self.merged(value.shape)
        if shape is None:
            return None
        like = {"dtype": value.dtype, "device": value.device}
        with self.graph.inserting_after(x):
            rows = self.graph.call_function(aten.full.default, (list(shape), number), like)
        rows.meta = {**x.meta, "val": value.new_empty(shape)}
        return rows

    def is_of_products(self, node: Node) -> bool:
        """Return whether a lookup is of matrices, of which products read merged rows alone."""
        is_of_matrices = args_of(node)[0].meta["val"].dim() >= MATRICES
        return is_of_matrices and all(self.merges(user) for user in self.readers(node))

    def readers(self, node: Node) -> list[Node]:
        """List the ops that read rows, through those on the dims after those of the rows."""
        found: list[Node] = []
        for user in node.users:
            is_through = _is_same(user) or self.arranged(user) is not None
            found += self.readers(user) if is_through else [user]
        return found

    def arranged(self, node: Node) -> tuple[Any, ...] | None:
        """Return the arguments of an op on the dims after those of the rows, for merged rows;
        None for another op.
        """
        if node.target not in DIMS:
            return None
        x, *options = args_of(node)
        is_of_rows = self.merged(x.meta["val"].shape) is not None
        return DIMS[node.target](x.meta["val"], len(self.dims), *options) if is_of_rows else None

    def look_up(self, node: Node) -> None:
        """Look rows up by the flat list."""
        x = args_of(node)[0]
        flat = self.listed(node)
        with self.graph.inserting_before(node):
            rows = self.graph.call_function(aten.index.Tensor, (x, [flat]))
        self.replace(node, rows)

    def listed(self, reader: Node) -> Node:
        """Return the flat list, made before the first op that reads it."""
        if self.flat is None:
            value = self.numbers.meta["val"]
            with self.graph.inserting_before(reader):
                self.flat = self.graph.call_function(aten.view.default, (self.numbers, [-1]))
            self.flat.meta = {**reader.meta, "val": value.new_empty(math.prod(value.shape))}
        return self.flat

    def replace(self, node: Node, rows: Node) -> None:
        """Put a view of rows in the place of a tensor with their dims."""
        value = node.meta["val"]
        rows.meta = {**node.meta, "val": value.new_empty(self.merged(value.shape))}
        with self.graph.inserting_after(rows):
            view = self.graph.call_function(aten.view.default, (rows, list(value.shape)))
        view.meta = {**node.meta, "val": value.new_empty(value.shape)}
        node.replace_all_uses_with(view)

    def merging(self, x: Node, reader: Node) -> Node:
        """Merge the dims of rows, before an op that reads them."""
        value = x.meta["val"]
        shape = self.merged(value.shape)
        assert shape is not None, f"{x} has no such rows"
        with self.graph.inserting_before(reader):
            rows = self.graph.call_function(aten.reshape.default, (x, list(shape)))
        rows.meta = {**reader.meta, "val": value.new_empty(shape)}
        return rows

    def follow(self) -> None:
        """Run the ops on single elements of rows, and those that add rows to matrices, on rows
        whose dims are merged.
        """
        for node in list(self.graph.nodes):
            if node.op != "call_function":
                continue
            if self.merges(node):
                flat = self.flat_of(args_of(node)[0])
                if flat is not None:
                    node.replace_all_uses_with(flat)
            elif node.target is aten.index_put.default:
                self.add(node)
            elif node.target is aten.new_zeros.default:
                like, *others = node.args
                node.args = (self.flat_of(like) or like, *others)
            elif (options := self.arranged(node)) is not None:
                self.arrange(node, options)
            elif torch.Tag.pointwise in getattr(node.target, "tags", ()):
                self.compute(node)

    def add(self, node: Node) -> None:
        """Add rows to matrices by the flat list, if they are those of its numbers."""
        x, indices, values, *others = args_of(node)
        has_rows = isinstance(values, Node) and self.merged(values.meta["val"].shape) is not None
        if [*indices] == [self.numbers] and has_rows:
            rows = self.flat_of(values) or self.merging(values, node)
            node.args = (x, [self.listed(node)], rows, *others)

    def arrange(self, node: Node, options: tuple[Any, ...]) -> None:
        """Run an op on the dims after those of the rows on merged rows."""
        rows = self.flat_of(args_of(node)[0])
        if rows is not None:
            with self.graph.inserting_before(node):
                new = self.graph.create_node("call_function", node.target, (rows, *options))
            self.replace(node, new)

    def compute(self, node: Node) -> None:
        """Run an op on single elements on merged rows, if all that it reads are such rows, or
        something reads its own merged.
        """
        value, read = node.meta["val"], node.all_input_nodes
        if not isinstance(value, torch.Tensor) or node.kwargs:
            return
        if {x.meta["val"].shape for x in read} != {value.shape} or self.merged(value.shape) is None:
            return
        flat = {x: rows for x in read if (rows := self.flat_of(x)) is not None}
        is_merged = len(flat) == len(read) or any(map(self.merges, self.readers(node)))
        if not flat or not is_merged:
            return
        merged: Callable[[Node], Any] = lambda x: flat.get(x) or self.merging(x, node)
        with self.graph.inserting_before(node):
            rows = self.graph.create_node(
                "call_function", node.target, torch.fx.map_arg(node.args, merged)
            )
        self.replace(node, rows)
