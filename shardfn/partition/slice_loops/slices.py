"""The ops that read a slice of a tensor, and those that compute the gradient of one."""

from __future__ import annotations

import operator
from typing import Any

import attrs
import torch
from torch.fx import Node

from ...ops.nodes import args_of

aten = torch.ops.aten


@attrs.frozen
class Slices:
    """The slices of a tensor along a dim, one for each turn of a loop.

    Args:
        source: the tensor.
        dim: along which it is cut.
        width: the size of a slice along the dim. None stands for slices without the dim.
    """

    source: Node
    dim: int
    width: int | None

    @property
    def turns(self) -> int:
        return self.source.meta["val"].shape[self.dim] // (self.width or 1)

    def stacked(self, x: torch.Tensor) -> torch.Tensor:
        """Return the slices of a tensor along a first dim."""
        if self.width is not None:
            x = x.unflatten(self.dim, (self.turns, self.width))
        return x.movedim(self.dim, 0)


def slices_of(node: Node) -> tuple[Slices, int] | None:
    """Return the slices of which an op reads one, and which one that is; None for other ops."""
    if node.target not in SLICES:
        return None
    source, dim, start, width = SLICES[node.target](node)
    return _numbered(source, source.meta["val"].shape, dim, start, width) if source else None


def _numbered(
    source: Node, shape: Any, dim: int, start: Any, width: int | None
) -> tuple[Slices, int] | None:
    """Return the slices of a tensor of a shape, and the number of the one from `start`; None if
    they are not as wide.
    """
    numbers = shape[dim], start, width or 1
    if not all(isinstance(x, int) for x in numbers):
        return None
    size, start, unit = numbers
    if size % unit or start % unit:
        return None
    return Slices(source, dim % len(shape), width), start % size // unit


# For each op, the tensor, the dim, the first index, and the size along the dim; None for slices
# without it.
Read = tuple[Any, int, Any, int | None]


def _selected(node: Node) -> Read:
    source, dim, index = args_of(node)
    return source, dim, index, None


def _sliced(node: Node) -> Read:
    source, dim, start, _, step = [*node.args, *(0, None, None, 1)[len(node.args) - 1 :]]
    width = node.meta["val"].shape[dim]
    return (source if step == 1 and width else None), dim, start or 0, width


def _part(node: Node) -> Read:
    several, position = args_of(node)
    if several.target is not aten.split.Tensor:
        return None, 0, 0, None
    source, size, *dims = args_of(several)
    return source, dims[0] if dims else 0, position * size, size


SLICES: dict[Any, Any] = {
    aten.select.int: _selected,
    aten.slice.Tensor: _sliced,
    operator.getitem: _part,
}


def gradient_of(node: Node) -> tuple[Slices, int] | None:
    """Return the slices that an op computes the gradient of one of, and the number of that one:
    the result is zero but for that slice. None for another op.
    """
    if node.target is aten.select_backward.default:
        source, shape, dim, index = args_of(node)
        return _numbered(source, shape, dim, index, None)
    if node.target is aten.slice_backward.default:
        source, shape, dim, start, _, step = args_of(node)
        width = source.meta["val"].shape[dim]
        return _numbered(source, shape, dim, start, width) if step == 1 and width else None
    return None
