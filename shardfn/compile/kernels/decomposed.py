"""Ops as those that Inductor makes of them: in a softmax, sums of rows are values of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ... import _compat
from ...ops.nodes import args_of
from . import op_kinds

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
    """Write ops of a graph as those that Inductor makes of them: softmaxes, and all that would be
    calls otherwise.
    """
    known: dict[object, Graph | None] = {}
    for node in list(graph.nodes):
        row = DECOMPOSED.get(node.target)
        if op_kinds.name(node) == "constant_pad_nd" and not any(args_of(node)[1]):
            node.replace_all_uses_with(args_of(node)[0])
            graph.erase_node(node)
        elif op_kinds.name(node) in op_kinds.SCATTERED:
            _add_in_float32(graph, node)
        elif row is not None:
            _decompose_rows(graph, node, *row)
        elif op_kinds.is_call(node):
            key = _signature(node)
            if key is not None and key not in known:
                args, kwargs = map_arg((node.args, node.kwargs), _value)
                known[key] = _compat.as_inductor_writes(node.target, args, kwargs)
            inner = known.get(key)
            if inner is not None:
                _write_out(graph, node, inner)


def _decompose_rows(graph: Graph, node: Node, fn: Callable[..., Node], count: int) -> None:
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


def _add_in_float32(graph: Graph, node: Node) -> None:
    """Have a sum of what several windows give be of float32 where its dtype is shorter."""
    value = _value(node)
    if value.dtype not in LOW:
        return
    users = list(node.users)
    with graph.inserting_after(node):
        cast = graph.call_function(aten._to_copy.default, (node,), {"dtype": value.dtype})
    cast.meta = dict(node.meta)
    node.meta["val"] = torch.empty_like(value, dtype=torch.float32)
    for user in users:
        user.replace_input_with(node, cast)


def _signature(node: Node) -> object:
    """All that the ops into which one is decomposed depend on; None for one that is not of ATen,
    or has symbols.
    """
    if getattr(node.target, "namespace", "") != "aten":
        return None
    layouts = []
    for x in node.all_input_nodes:
        value = _value(x)
        if not isinstance(value, torch.Tensor):
            return None
        sizes = (*value.shape, *value.stride(), value.storage_offset())
        if not all(isinstance(n, int) for n in sizes):
            return None
        layouts.append((value.dtype, tuple(value.shape), sizes))
    places = {x: k for k, x in enumerate(node.all_input_nodes)}
    form = map_arg((node.args, node.kwargs), lambda x: f"input {places[x]}")
    return node.target, tuple(layouts), repr(form)


def _write_out(graph: Graph, node: Node, inner: Graph) -> None:
    """Write the ops of a graph in place of a node, whose tensors are its inputs."""
    tensors = [x for x in _flat(node.args, node.kwargs) if isinstance(x, Node)]
    holders = inner.find_nodes(op="placeholder")
    copies = dict(zip(holders, tensors, strict=True))
    with graph.inserting_before(node):
        for x in inner.nodes:
            if x.op == "call_function":
                copy = graph.node_copy(x, copies.__getitem__)
                copy.meta = {**node.meta, "val": x.meta["val"]}
                copies[x] = copy
    (output,) = inner.find_nodes(op="output")
    results = map_arg(output.args[0], copies.__getitem__)
    if isinstance(results, Node):
        node.replace_all_uses_with(results)
    else:
        for item in list(node.users):
            item.replace_all_uses_with(results[args_of(item)[1]])
            graph.erase_node(item)
    graph.erase_node(node)
    _erase_unread(graph, [*copies.values()])


def _flat(*trees: Any) -> list[Node]:
    """The nodes among arguments, in order, each as often as it stands there."""
    found: list[Node] = []
    map_arg(trees, found.append)
    return found


def _erase_unread(graph: Graph, nodes: list[Node]) -> None:
    for node in reversed(nodes):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
