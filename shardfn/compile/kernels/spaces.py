"""The loops of kernels: how many results and elements, and what a value looks like in one."""

from __future__ import annotations

import math
from operator import getitem

import torch
from torch.fx import Node

from ...ops.nodes import args_of
from .op_kinds import CHANNELS_LAST, COPY

# results, elements, whether a result is a sum of a row, whether channels come last
Space = tuple[int, int, bool, bool]


def outputs_of(node: Node) -> list[Node]:
    """The tensors that a node computes: those of a tuple that are read."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        return [node]
    return [x for x in node.users if x.target is getitem]


def layout_of(node: Node) -> object:
    """The sizes, strides and offset of a value, with dims merged that are read as one."""
    x = node.meta.get("val")
    if not isinstance(x, torch.Tensor):
        return None
    merged: list[tuple[int, int]] = []
    for size, stride in zip(x.shape, x.stride(), strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:
            size *= merged.pop()[0]
        merged.append((size, stride))
    sizes = tuple(size for size, _ in merged)
    strides = tuple(stride for _, stride in merged)
    return sizes, strides, x.storage_offset()


def flat(node: Node) -> Space:
    """The loop over the elements of a value."""
    x = node.meta["val"]
    count = math.prod(x.shape)
    is_last = node.meta.get(COPY) == CHANNELS_LAST and is_image(x)
    return count, count, True, is_last


def is_image(x: torch.Tensor) -> bool:
    """Whether channels may come before other dims or last: they have more than one element, and
    so have the dims after them.
    """
    if x.ndim != 4:
        return False
    _, channels, height, width = x.shape
    return channels > 1 and height * width > 1


def reduced(node: Node) -> Space:
    """The loop of a reduction."""
    x = node.all_input_nodes[0].meta["val"]
    value = node.meta["val"]
    first = value if isinstance(value, torch.Tensor) else value[0]
    where = reduced_dims(node)
    long = [d for d in range(x.ndim) if x.shape[d] != 1]
    last = set(long[len(long) - len(where) :])
    results = math.prod(first.shape)
    elements = math.prod(x.shape)
    return results, elements, where <= last, False


def reduced_dims(node: Node) -> set[int]:
    """The dims over which a reduction adds, of more than one element."""
    x = node.all_input_nodes[0].meta["val"]
    long = {d for d in range(x.ndim) if x.shape[d] != 1}
    args = args_of(node)
    given = args[1] if len(args) > 1 else None
    dims = [given] if isinstance(given, int) else given
    if not dims or not x.ndim:
        return long
    return long & {d % x.ndim for d in dims}
