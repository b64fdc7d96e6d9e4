"""Facts about the elements of tensors that follow from the ops that make them."""

from __future__ import annotations

import torch
from torch.fx import Node

from ....ops.nodes import args_of
from ... import rules
from ...rules.lookups.counted import COPIES

aten = torch.ops.aten
INDICES = {
    aten.topk.default,
    aten.sort.default,
    aten.sort.stable,
    aten.max.dim,
    aten.min.dim,
}  # ops whose second result has places along a dim
PLACES = {aten.argmax.default, aten.argmin.default}
MOVES = {
    *COPIES,
    aten.clone.default,
    aten.expand.default,
    aten.permute.default,
    aten.transpose.int,
    aten.select.int,
    aten.slice.Tensor,
    aten._unsafe_view.default,
    aten.detach.default,
}  # ops that keep elements as they are
INTS = {torch.int32, torch.int64}  # dtypes that hold every place


def is_constant_along(node: Node, dim: int) -> bool:
    """Whether a program says that a tensor has the same elements all along a dim."""
    value = node.meta["val"]
    if rules.fill_value(node.target, node.args, value.dtype) is not None:
        return True
    if value.shape[dim] == 1 or value.numel() == 1:
        return True
    if node.target is aten.copy.default:
        return _are_constant([args_of(node)[1]], value.dim(), dim)
    if node.target is aten.expand.default or rules.is_pointwise(node.target):
        return _are_constant(node.all_input_nodes, value.dim(), dim)
    return False


def _are_constant(nodes: list[Node], n: int, dim: int) -> bool:
    """Whether tensors are constant along the dim with which a dim of n dims is aligned."""
    places = [(x, dim - n + x.meta["val"].dim()) for x in nodes]
    return all(d < 0 or is_constant_along(x, d) for x, d in places)


def is_at_least(node: Node, least: float) -> bool:
    """Whether a program says that all elements are at least a number."""
    node = source_of(node, MOVES)
    dtype = node.meta["val"].dtype
    if dtype is torch.uint8 or node.target in PLACES:
        return least <= 0
    if node.target is aten.clamp.default:
        low = node.args[1] if len(node.args) > 1 else None
        return isinstance(low, (int, float)) and low >= least
    if getattr(node.target, "__name__", "") != "getitem":
        return False
    source, number = args_of(node)
    return source.target in INDICES and number == 1 and least <= 0


def source_of(node: Node, through: set[object]) -> Node:
    """The tensor that a node has the elements of, in other shapes and wide dtypes."""
    while node.target in through and is_faithful(node):
        node = args_of(node)[0]
    return node


def is_faithful(node: Node) -> bool:
    """Whether an op is not a cast to a dtype of few numbers."""
    dtype = node.meta["val"].dtype
    is_cast = node.target is aten._to_copy.default
    return not is_cast or dtype in INTS or dtype.is_floating_point
