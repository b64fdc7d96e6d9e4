"""The share of an op's work that one rank has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ...types import MeshPlacements
from .. import layout


def share_of(
    tensors: Iterable[tuple[torch.Tensor, MeshPlacements]], sizes: Sequence[int], axis: int
) -> float:
    """Return the share of an op's work that the busiest rank of an axis has.

    Args:
        tensors: the op's results and inputs, with their placements up to this axis at least.
        sizes: of the mesh.
        axis: the axis.
    """
    for x, placements in tensors:
        cut = layout.split(placements[axis])
        if cut is not None:
            dim, unit = cut
            outer = layout.block_count(placements[axis])
            earlier = placements[:axis]
            length, _ = layout.grain(x.shape[dim], dim, earlier, sizes, outer)
            length = max(length, 1)
            return min(layout.full_chunk(length, unit, sizes[axis]), length) / length
    return 1.0
