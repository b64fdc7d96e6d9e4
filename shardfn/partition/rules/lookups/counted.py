"""Indices of which a program says that they are all numbers of a dim, in order."""

from __future__ import annotations

import torch

aten = torch.ops.aten
ARANGES: set[object] = {aten.arange.default, aten.arange.start, aten.arange.start_step}
WIDE = 4  # bytes of a number that holds every index
# Ops that keep the elements of an index in their order.
COPIES = {aten.unsqueeze.default, aten.view.default, aten.alias.default, aten._to_copy.default}


def along(node: torch.fx.Node, size: int) -> int | None:
    """The dim along which an index counts from 0 to the size, with one element in other dims;
    None if the program does not say so.
    """
    value = node.meta["val"]
    wide = [d for d, n in enumerate(value.shape) if n != 1]
    if value.numel() != size or len(wide) != 1:
        return None
    while node.target in COPIES or _adds_zero(node):
        if node.meta["val"].dtype.itemsize < WIDE:
            return None
        node = node.all_input_nodes[0]
    return wide[0] if _counts(node, size) else None


def _counts(node: torch.fx.Node, size: int) -> bool:
    """Whether a node is an arange from 0 to the size."""
    first = (size,) if node.target is aten.arange.default else (0, size)
    is_by_ones = node.args[len(first) :] in ((), (1,))
    return node.target in ARANGES and node.args[: len(first)] == first and is_by_ones


def _adds_zero(node: torch.fx.Node) -> bool:
    is_number = len(node.all_input_nodes) == 1
    return node.target is aten.add.Tensor and is_number and node.args[1:] == (0,)
