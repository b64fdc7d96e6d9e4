"""Inputs that Inductor copies for the kernels that prescribe their strides: of convolutions on a
CPU to channels last, of products in order, of others where a formula would have to be stored.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ...capture.checkpoint.recompute import owner_of
from ...ops.placement import AFTER
from ...schedule import copied
from .decomposed import decompose

aten = torch.ops.aten
CONVOLUTIONS = {aten.convolution.default, aten.convolution_backward.default}
STRIDED = {
    AFTER,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}
PRODUCTS = {aten.mm.default, aten.bmm.default, aten.addmm.default}
TENSORS = 3  # the first arguments of a convolution, of which none is a bias
COPY = "shardfn: a copy for one reader"
CHANNELS_LAST = "channels last"
IF_FORMULA = "of a formula"
OF_STORED = "of a stored value"


def with_copies(graph: Graph) -> Graph:
    """The graph with these copies as nodes, whose meta says which kind they are under `COPY`."""
    own = copied(graph)
    decompose(own)
    for node in own.nodes:
        if node.target in CONVOLUTIONS:
            given, rest = node.args[:TENSORS], node.args[TENSORS:]
            laid_out = [_channels_last(own, node, x) for x in given]
            node.args = (*laid_out, *rest)
        elif node.target in PRODUCTS:
            node.args = tuple(_in_order(own, node, x) for x in node.args)
        elif node.target in STRIDED:
            inputs = node.all_input_nodes
            copies = {x: _copy(own, node, x, IF_FORMULA) for x in inputs}
            node.args, node.kwargs = torch.fx.node.map_arg(
                (node.args, node.kwargs), copies.__getitem__
            )
    return own


def _channels_last(graph: Graph, reader: Node, x: object) -> object:
    if not isinstance(x, Node) or x.meta["val"].ndim != 4 or is_convolved(x):
        return x
    return _copy(graph, reader, x, CHANNELS_LAST)


def _in_order(graph: Graph, reader: Node, x: object) -> object:
    """A factor whose elements stand next to each other along some dim: an expanded number is
    copied.
    """
    value = x.meta.get("val") if isinstance(x, Node) else None
    if not isinstance(x, Node) or not isinstance(value, torch.Tensor):
        return x
    if value.ndim < 2 or 1 in value.stride():
        return x
    copy = _copy(graph, reader, x, OF_STORED)
    copy.meta["val"] = torch.empty_like(value, memory_format=torch.contiguous_format)
    return copy


def _copy(graph: Graph, reader: Node, x: Node, kind: str) -> Node:
    with graph.inserting_before(reader):
        copy = graph.call_function(aten.clone.default, (x,))
    copy.meta = {"val": x.meta["val"], "source": x.meta.get("source"), COPY: kind}
    return copy


def is_convolved(node: Node) -> bool:
    """Whether a convolution of images made a value, channels last."""
    maker = owner_of(node)
    if getattr(maker.target, "__name__", "") == "getitem":
        maker = maker.all_input_nodes[0]
    is_image = node.meta["val"].ndim == 4
    return is_image and maker.target in CONVOLUTIONS
