"""Softmaxes as the ops that Inductor makes of them: the sums of rows are values of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ...ops.nodes import args_of

aten = torch.ops.aten
EXP = aten.exp.default
LOG = aten.log.default
SUB = aten.sub.Tensor
MUL = aten.mul.Tensor
DIV = aten.div.Tensor
LOW = {torch.bfloat16, torch.float16}  # dtypes of which rows are added in float32


def _value(node: Node) -> Any:
    return node.meta["val"]


@attrs.frozen
class _Rows:
    """Ops over the last or another dim of a value, added to a graph before a node.

    Args:
        graph: to which they are added.
        node: in whose place they stand.
        dim: of the rows.
    """

    graph: Graph
    node: Node
    dim: int

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """An op, with its value."""
        made = self.graph.call_function(target, args, kwargs)
        given = map_arg(args, _value)
        made.meta = dict(self.node.meta)
        made.meta["val"] = target(*given, **kwargs)
        return made

    def cast(self, x: Node, dtype: torch.dtype) -> Node:
        """A value in another dtype."""
        if _value(x).dtype == dtype:
            return x
        return self.call(aten._to_copy.default, x, dtype=dtype)

    def wide(self, x: Node) -> Node:
        """A value in the dtype in which rows are added."""
        if _value(x).dtype not in LOW:
            return x
        return self.cast(x, torch.float32)

    def most(self, x: Node) -> Node:
        """The largest element of each row."""
        return self.call(aten.amax.default, x, [self.dim], True)

    def sum(self, x: Node) -> Node:
        """The sum of each row."""
        return self.call(aten.sum.dim_IntList, x, [self.dim], True)


def _softmax(rows: _Rows, x: Node) -> Node:
    x = rows.wide(x)
    most = rows.most(x)
    rest = rows.call(SUB, x, most)
    e = rows.call(EXP, rest)
    total = rows.sum(e)
    return rows.call(DIV, e, total)


def _softmax_backward(rows: _Rows, g: Node, y: Node) -> Node:
    g = rows.wide(g)
    y = rows.wide(y)
    product = rows.call(MUL, g, y)
    total = rows.sum(product)
    part = rows.call(MUL, y, total)
    return rows.call(SUB, product, part)


def _log_softmax(rows: _Rows, x: Node) -> Node:
    x = rows.wide(x)
    most = rows.most(x)
    rest = rows.call(SUB, x, most)
    e = rows.call(EXP, rest)
    total = rows.sum(e)
    log = rows.call(LOG, total)
    return rows.call(SUB, rest, log)


def _log_softmax_backward(rows: _Rows, g: Node, y: Node) -> Node:
    g = rows.wide(g)
    y = rows.wide(y)
    total = rows.sum(g)
    e = rows.call(EXP, y)
    part = rows.call(MUL, e, total)
    return rows.call(SUB, g, part)


# an op, and the number of its tensors, after which stands the dim
DECOMPOSED: dict[object, tuple[Callable[..., Node], int]] = {
    aten._softmax.default: (_softmax, 1),
    aten._softmax_backward_data.default: (_softmax_backward, 2),
    aten._log_softmax.default: (_log_softmax, 1),
    aten._log_softmax_backward_data.default: (_log_softmax_backward, 2),
}


def decompose(graph: Graph) -> None:
    """Write each softmax of a graph as these ops."""
    for node in list(graph.nodes):
        row = DECOMPOSED.get(node.target)
        if row is None:
            continue
        fn, count = row
        args = args_of(node)
        tensors = args[:count]
        dim = args[count]
        dtype = _value(node).dtype
        with graph.inserting_before(node):
            rows = _Rows(graph, node, dim)
            value = fn(rows, *tensors)
            value = rows.cast(value, dtype)
        node.replace_all_uses_with(value)
        graph.erase_node(node)
