"""Attention written as products and a softmax, as the one kernel that Inductor makes of it.

Inductor's own patterns decide. They are tried on the ops around each softmax, once for all layers
that are alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ..._compat.inductor import with_fused_attention
from ..._compat.strides import Relaid
from . import op_kinds

aten = torch.ops.aten
SOFTMAXES = {aten._softmax.default, aten._softmax_backward_data.default}
PRODUCT = aten.bmm.default
AROUND = {"_to_copy", "clone", "div", "mul"}  # around products, beside views


def fuse_attention(graph: Graph) -> None:
    """Put attention kernels in the place of products and softmaxes, where Inductor does."""
    known: dict[object, Graph | None] = {}
    seen: set[Node] = set()
    for node in graph.find_nodes(op="call_function", target=aten._softmax.default):
        if node in seen:
            continue
        region = _region(node)
        seen |= region
        nodes = [x for x in graph.nodes if x in region]
        if sum(x.target is PRODUCT for x in nodes) < 2:
            continue
        inputs = list(dict.fromkeys(y for x in nodes for y in x.all_input_nodes if y not in region))
        results = [x for x in nodes if any(y not in region for y in x.users)]
        key = _signature(nodes, inputs, results)
        if key not in known:
            known[key] = _fused(nodes, inputs, results)
        inner = known[key]
        if inner is not None:
            _put(graph, node, inner, inputs, results)


def _region(softmax: Node) -> set[Node]:
    """The ops around a softmax and its gradient up to products, and views around those."""
    inside, outside = {softmax: None}, dict[Node, None]()
    queue = [softmax]
    while queue:
        node = queue.pop()
        for x in _beside(node):
            if x.target is PRODUCT and x not in outside:
                outside[x] = None
            elif x not in inside and _is_within(x):
                inside[x] = None
                queue.append(x)
    queue = list(outside)
    while queue:
        for x in _beside(queue.pop()):
            if x not in outside and x not in inside and _is_around(x):
                outside[x] = None
                queue.append(x)
    return {*inside, *outside}


def _beside(node: Node) -> list[Node]:
    """The ops whose values a node reads, and those that read its own."""
    return [x for x in (*node.all_input_nodes, *node.users) if x.op == "call_function"]


def _is_within(node: Node) -> bool:
    """Whether an op may stand between the products of an attention."""
    is_single = isinstance(node.meta.get("val"), torch.Tensor)
    is_random = op_kinds.is_random(node)
    is_plain = op_kinds.is_alias(node) or op_kinds.is_formula(node)
    return node.target in SOFTMAXES or (is_single and is_plain and not is_random)


def _is_around(node: Node) -> bool:
    """Whether an op may stand between a product of an attention and its inputs or results."""
    is_scaled = op_kinds.name(node) in AROUND and len(node.all_input_nodes) == 1
    return op_kinds.is_alias(node) or is_scaled


def _signature(nodes: list[Node], inputs: list[Node], results: list[Node]) -> object:
    """All that the kernels depend on."""
    number = {x: f"%{k}" for k, x in enumerate((*inputs, *nodes))}
    form = [(x.target, repr(map_arg((x.args, x.kwargs), lambda y: number[y]))) for x in nodes]
    values = [x.meta["val"] for x in inputs]
    layouts = [(x.dtype, tuple(x.shape), x.stride()) for x in values]
    return tuple(form), tuple(layouts), tuple(number[x] for x in results)


def _fused(nodes: list[Node], inputs: list[Node], results: list[Node]) -> Graph | None:
    """The ops after Inductor's passes, if they make a kernel; else None."""
    values = [x.meta["val"] for x in inputs]
    if not all(isinstance(x, torch.Tensor) for x in values):
        return None
    inner = Graph()
    copies: dict[Node, Node] = {x: inner.placeholder(f"x{k}") for k, x in enumerate(inputs)}
    for x in nodes:
        copies[x] = inner.node_copy(x, copies.__getitem__)
    inner.output([copies[x] for x in results])
    run = Relaid(GraphModule(torch.nn.Module(), inner)).run
    return with_fused_attention(run, values)


def _put(
    graph: Graph, softmax: Node, inner: Graph, inputs: list[Node], results: list[Node]
) -> None:
    """Replace results by those of a graph of some inputs. Each op comes after its last input."""
    place = {x: k for k, x in enumerate(graph.nodes)}
    copies: dict[Node, Any] = dict(zip(inner.find_nodes(op="placeholder"), inputs, strict=True))
    after: dict[Node, Node] = {}
    for x in inner.nodes:
        if x.op != "call_function":
            continue
        read: list[Node] = [copies[y] for y in x.all_input_nodes]
        old = [after.get(y, y) for y in read] or inputs[:1]
        anchor = max(old, key=lambda y: place[y])
        with graph.inserting_after(_end(anchor, after)):
            copy = graph.node_copy(x, copies.__getitem__)
        copy.meta = {**softmax.meta, "val": x.meta["val"]}
        copies[x], after[copy] = copy, anchor
    (output,) = inner.find_nodes(op="output")
    made = map_arg(output.args[0], copies.__getitem__)
    for result, new in zip(results, made, strict=True):
        result.replace_all_uses_with(new)
    _erase(graph)


def _end(anchor: Node, after: dict[Node, Node]) -> Node:
    """The last of the new ops that come after a node."""
    while after.get(anchor.next) is not None:
        anchor = anchor.next
    return anchor


def _erase(graph: Graph) -> None:
    """Erase ops that nothing reads, if they have no effect."""
    for node in list(reversed(graph.nodes)):
        is_ours = node.target in SOFTMAXES or _is_within(node) or node.target is PRODUCT
        if node.op == "call_function" and not node.users and is_ours:
            graph.erase_node(node)
