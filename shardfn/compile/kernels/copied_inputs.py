"""Inputs that Inductor copies for the kernels that prescribe their strides: of convolutions on a
CPU to channels last, of products in order, of others where a formula would have to be stored.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ...capture.checkpoint.recompute import owner_of
from ...ops.placement import AFTER
from ...schedule import copied
from . import op_kinds
from .attention import fuse_attention
from .decomposed import decompose
from .op_kinds import CHANNELS_LAST, COPY, IF_FORMULA, IN_DIMS, INSIDE, OF_STORED
from .spaces import is_image

aten = torch.ops.aten
CONVOLUTIONS = {aten.convolution.default, aten.convolution_backward.default}
STRIDED = {
    AFTER,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}
PRODUCTS = {aten.mm.default, aten.bmm.default, aten.addmm.default}
TENSORS = 3  # the first arguments of a convolution, of which none is a bias


def with_copies(graph: Graph) -> Graph:
    """The graph with these copies as nodes, whose meta says which kind they are under `COPY`."""
    own = copied(graph)
    fuse_attention(own)
    decompose(own)
    for node in own.nodes:
        if node.target in CONVOLUTIONS:
            given, rest = (node.args[:TENSORS], node.args[TENSORS:])
            laid_out = [_channels_last(own, node, x) for x in given]
            node.args = (*laid_out, *rest)
        elif op_kinds.name(node) in op_kinds.COMPARED:
            _number_in_windows(node)
        elif op_kinds.name(node) == "upsample_bilinear2d":
            _copied_inside(own, node)
        elif node.target in PRODUCTS:
            node.args = tuple(_in_order(own, node, x) for x in node.args)
        elif node.target in STRIDED:
            inputs = node.all_input_nodes
            copies = {x: _copy(own, node, x, IF_FORMULA) for x in inputs}
            node.args, node.kwargs = torch.fx.node.map_arg(
                (node.args, node.kwargs), copies.__getitem__
            )
    (output,) = own.find_nodes(op="output")
    results = [_in_dims(own, output, x) for x in output.args[0]]
    output.args = (results,)
    return own


def _copied_inside(graph: Graph, node: Node) -> None:
    """Note the memory that torch's kernel takes while it interpolates small images: the image and
    the result with channels last.
    """
    (x, *_) = node.all_input_nodes
    result = node.meta["val"]
    is_large = sum(result.shape[2:]) > op_kinds.SMALL_IMAGE
    if is_large or _is_interpolated(node):
        return
    count = x.meta["val"].numel() + result.numel()
    with graph.inserting_before(node):
        inside = graph.call_function(aten.empty.memory_format, ([count],))
    inside.meta = {**node.meta, "val": result.new_empty(count), COPY: INSIDE}
    node.meta[INSIDE] = inside


def _number_in_windows(pool: Node) -> None:
    """Give the places of the largest elements, if only its backward reads them, as Inductor does:
    as bytes that number the elements of a window.
    """
    for item in pool.users:
        readers = list(item.users)
        is_inner = all(op_kinds.name(x) in op_kinds.SCATTERED for x in readers)
        if item.args[1] == 1 and is_inner:
            item.meta["val"] = torch.empty_like(item.meta["val"], dtype=torch.int8)


def _in_dims(graph: Graph, output: Node, x: object) -> object:
    """A result in the order of its dims: that of a convolution is channels last before."""
    if (
        not isinstance(x, Node)
        or not (is_convolved(x) or _is_interpolated(x))
        or not is_image(x.meta["val"])
    ):
        return x
    return _copy(graph, output, x, IN_DIMS)


def _channels_last(graph: Graph, reader: Node, x: object) -> object:
    if not isinstance(x, Node) or x.meta["val"].ndim != 4 or is_convolved(x):
        return x
    return _copy(graph, reader, x, CHANNELS_LAST)


def _in_order(graph: Graph, reader: Node, x: object) -> object:
    """A factor whose elements stand next to each other along some dim: an expanded number is
    copied.
    """
    if not isinstance(x, Node):
        return x
    value = x.meta["val"]
    strides = value.stride()
    if len(strides) < 2 or 1 in strides:
        return x
    copy = _copy(graph, reader, x, OF_STORED)
    order = torch.contiguous_format
    copy.meta["val"] = torch.empty_like(value, memory_format=order)
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


def _is_interpolated(node: Node) -> bool:
    """Whether a value is interpolated from an image that a convolution made, channels last."""
    if op_kinds.name(node) != "upsample_bilinear2d":
        return False
    (source, *_) = node.all_input_nodes
    while op_kinds.is_formula(source) and source.all_input_nodes:
        source = source.all_input_nodes[0]
    return is_convolved(source)
