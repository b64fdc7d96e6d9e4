"""Strided shards of local tensors: the elements that a rank holds, and the view of a dim in
which an axis shards one of three.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import attrs
import torch

from ..types import AxisPlacement
from .layout import block_count, chunk, dim_and_unit, factors, is_plain, is_zigzag, levels, shards


def strided_factors(
    shape: Sequence[int],
    placements: Sequence[AxisPlacement],
    sizes: Sequence[int],
    coordinates: Sequence[int],
) -> tuple[int, ...]:
    """Return the factors of local sizes that decide how a rank views its strided shards."""
    found: list[int] = []
    for dim in strided_dims(placements):
        size = shape[dim]
        found += factors(size, dim, placements, sizes, coordinates)
        for outer in levels(dim, placements):
            if size % outer:
                coarser = [
                    m if shards(m, dim) and block_count(m) < outer else "R" for m in placements
                ]
                found += factors(size, dim, coarser, sizes, coordinates)
    return tuple(found)


def strided_dims(placements: Sequence[AxisPlacement]) -> list[int]:
    """List the dims that have strided shards."""
    return sorted({dim_and_unit(m)[0] for m in placements if not is_plain(m)})


def elements(
    size: int,
    dim: int,
    placements: Sequence[AxisPlacement],
    sizes: Sequence[int],
    coordinates: Sequence[int],
) -> torch.Tensor:
    """Return the indices along a dim that a rank holds."""
    held = torch.arange(size)
    cuts = [
        (block_count(m), dim_and_unit(m)[1], n, c, is_zigzag(m))
        for m, n, c in zip(placements, sizes, coordinates, strict=True)
        if shards(m, dim)
    ]
    length = size
    before = 0
    for outer, unit, n, c, turns in sorted(cuts, key=operator.itemgetter(0)):
        if outer != before:
            # uneven blocks are the chunks of the axes before
            length = held.numel() if size % outer else size // outer
        before = outer
        start, length_here = chunk(length, unit, n, c)
        runs = held.view(-1, max(length, 1))
        held = runs.narrow(1, start, length_here)
        if turns:
            back = runs.narrow(1, length - start - length_here, length_here)
            held = torch.stack([held[::2], back[1::2]], 1)
        held = held.flatten()
        length = length_here
    return held


@attrs.frozen
class Open:
    """A view of a local dim as (outer, sharded, inner), of which one axis shards the middle.

    Args:
        dim: the dim.
        outer: the number of runs before the sharded dim.
        size: of the sharded dim, before the axis shards it.
        inner: the number of elements of a run after it.
        unit: of the sharded dim.
        turns: whether it is a zigzag: in every second run the ranks are in reverse order.
    """

    dim: int
    outer: int
    size: int
    inner: int
    unit: int
    turns: bool = False

    @property
    def is_dim(self) -> bool:
        """Whether the axis shards the dim itself, so that no view is needed."""
        return self.outer == self.inner == 1


def opened(
    shape: Sequence[int],
    placements: Sequence[AxisPlacement],
    axis: int,
    sizes: Sequence[int],
    coordinates: Sequence[int],
) -> Open:
    """Describe how one axis shards its dim of a rank's local tensor."""
    placement = placements[axis]
    dim, unit = dim_and_unit(placement)
    outers = levels(dim, placements)
    others = [*placements[:axis], "R", *placements[axis + 1 :]]
    found = factors(shape[dim], dim, others, sizes, coordinates, outers)
    i = outers.index(block_count(placement)) + 1
    block = max(shape[dim] // outers[i], 1) if i < len(outers) else 1
    return Open(
        dim=dim,
        outer=math.prod(found[:i]),
        size=found[i],
        inner=math.prod(found[i + 1 :]),
        unit=1 if unit % block else unit // block,
        turns=is_zigzag(placement),
    )
