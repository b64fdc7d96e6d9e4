"""Facts about the elements of tensors that follow from the ops that make them."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch.fx import Node

from ....ops.nodes import args_of
from ... import rules
from ...rules.lookups.counted import COPIES

aten = torch.ops.aten
# ops whose second result has places along a dim
INDICES: set[object] = {
    aten.topk.default,
    aten.sort.default,
    aten.sort.stable,
    aten.max.dim,
    aten.min.dim,
}
PLACES: set[object] = {aten.argmax.default, aten.argmin.default}
# ops that keep elements as they are
MOVES: set[object] = {
    *COPIES,
    aten.clone.default,
    aten.expand.default,
    aten.permute.default,
    aten.transpose.int,
    aten.select.int,
    aten.slice.Tensor,
    aten._unsafe_view.default,
    aten.detach.default,
}
# dtypes that hold every place
INTS = {torch.int32, torch.int64}


def is_constant_along(node: Node, dim: int) -> bool:
    """Whether a program says that a tensor has the same elements all along a dim."""
    value = node.meta["val"]
    if rules.fill_value(node.target, node.args, value.dtype) is not None:
        return True
    if value.shape[dim] == 1:
        return True
    if value.numel() == 1:
        return True
    if node.target is aten.copy.default:
        return _are_constant(node.all_input_nodes[1:], value.dim(), dim)
    if node.target is aten.expand.default:
        return _are_constant(node.all_input_nodes, value.dim(), dim)
    if rules.is_pointwise(node.target):
        return _are_constant(node.all_input_nodes, value.dim(), dim)
    return False


def _are_constant(nodes: Sequence[Node], n: int, dim: int) -> bool:
    """Whether tensors are constant along the dim with which a dim of n dims is aligned."""
    for node in nodes:
        place = dim - n + node.meta["val"].dim()
        if place >= 0 and not is_constant_along(node, place):
            return False
    return True


def is_at_least(node: Node, least: float) -> bool:
    """Whether a program says that all elements are at least a number."""
    source = source_of(node, MOVES)
    low = _lowest(source)
    return low is not None and low >= least


def _lowest(node: Node) -> float | None:
    """A number below which no element is. None if the program does not say one."""
    if node.target in PLACES:
        return 0
    if node.meta["val"].dtype is torch.uint8:
        return 0
    if node.target is aten.clamp.default:
        _, *ends = node.args
        low = ends[0] if ends else None
        return low if isinstance(low, (int, float)) else None
    if is_item(node):
        source, number = args_of(node)
        return 0 if source.target in INDICES and number == 1 else None
    return None


def is_item(node: Node) -> bool:
    """Whether a node is one of the results of another one."""
    return getattr(node.target, "__name__", "") == "getitem"


def source_of(node: Node, through: Container[object]) -> Node:
    """The tensor that a node has the elements of, in other shapes and wide dtypes."""
    while node.target in through and is_faithful(node):
        node = args_of(node)[0]
    return node


def is_faithful(node: Node) -> bool:
    """Whether an op is not a cast to a dtype of few numbers."""
    if node.target is not aten._to_copy.default:
        return True
    dtype = node.meta["val"].dtype
    return dtype in INTS or dtype.is_floating_point
