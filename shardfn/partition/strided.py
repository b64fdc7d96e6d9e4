"""Strided shards of local tensors: the elements that a rank holds, and the view of a dim in
which an axis shards one of three.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import attrs
import torch

from ..types import Mark
from .layout import chunk, cut_of, factors, is_plain, levels, outer_of, shards


def strided_factors(
    shape: Sequence[int], marks: Sequence[Mark], sizes: Sequence[int], coordinates: Sequence[int]
) -> tuple[int, ...]:
    """The factors of the local sizes of all dims that have strided shards, and the sizes of the
    uneven blocks of which a rank holds a chunk.
    """
    found: list[int] = []
    for dim in strided_dims(marks):
        size = shape[dim]
        found += factors(size, dim, marks, sizes, coordinates)
        for outer in levels(dim, marks):
            if size % outer:
                coarser = [m if shards(m, dim) and outer_of(m) < outer else "R" for m in marks]
                found += factors(size, dim, coarser, sizes, coordinates)
    return tuple(found)


def strided_dims(marks: Sequence[Mark]) -> list[int]:
    """The dims that have strided shards."""
    return sorted({cut_of(m)[0] for m in marks if not is_plain(m)})


def elements(
    size: int, dim: int, marks: Sequence[Mark], sizes: Sequence[int], coordinates: Sequence[int]
) -> torch.Tensor:
    """The numbers of the elements of a dim that a rank holds."""
    held = torch.arange(size)
    cuts = [
        (outer_of(m), cut_of(m)[1], n, c)
        for m, n, c in zip(marks, sizes, coordinates, strict=True)
        if shards(m, dim)
    ]
    length = size
    before = 0
    for outer, unit, n, c in sorted(cuts, key=operator.itemgetter(0)):
        if outer != before:
            # uneven blocks are the chunks of the axes before
            length = held.numel() if size % outer else size // outer
        before = outer
        start, length_here = chunk(length, unit, n, c)
        held = held.view(-1, max(length, 1)).narrow(1, start, length_here)
        held = held.flatten()
        length = length_here
    return held


@attrs.frozen
class Open:
    """A dim of a local tensor, viewed so that one axis shards the middle of three dims.

    Args:
        dim: the dim.
        outer: the number of runs before the sharded dim.
        size: of the sharded dim, before the axis shards it.
        inner: the number of elements of a run after it.
        unit: of the sharded dim.
    """

    dim: int
    outer: int
    size: int
    inner: int
    unit: int

    @property
    def is_dim(self) -> bool:
        """Whether the axis shards the dim itself."""
        return self.outer == self.inner == 1


def opened(
    shape: Sequence[int],
    marks: Sequence[Mark],
    axis: int,
    sizes: Sequence[int],
    coordinates: Sequence[int],
) -> Open:
    """How an axis shards its dim of a rank's local tensor. It is the last of the axes that view
    the dim as so many blocks.
    """
    mark = marks[axis]
    dim, unit = cut_of(mark)
    outers = levels(dim, marks)
    others = [*marks[:axis], "R", *marks[axis + 1 :]]
    found = factors(shape[dim], dim, others, sizes, coordinates, outers)
    i = outers.index(outer_of(mark)) + 1
    block = max(shape[dim] // outers[i], 1) if i < len(outers) else 1
    return Open(
        dim=dim,
        outer=math.prod(found[:i]),
        size=found[i],
        inner=math.prod(found[i + 1 :]),
        unit=1 if unit % block else unit // block,
    )
