"""`donations`: pairs each donated argument with a result that is written into its memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..capture.aten_views import memory_of
from ..types import LocalProgram


def donations(program: LocalProgram, donated: Sequence[int]) -> dict[int, int]:
    """Map output positions to the positions of donated placeholders with the same local layout.

    An output that already lies in the memory of an input gets no donated memory. Another output
    might be written over it first.
    """
    free = list(donated)
    placeholders = program.graph.find_nodes(op="placeholder")
    results = program.graph.find_nodes(op="output")[0].args[0]
    memories = [memory_of(node) for node in results]
    free = [i for i in free if placeholders[i] not in memories]
    pairs: dict[int, int] = {}
    for o, node in enumerate(results):
        match = next((i for i in free if _same_layout(placeholders[i], node)), None)
        if (
            match is not None
            and memories[o] not in placeholders
            and memories.index(memories[o]) == o
        ):
            pairs[o] = match
            free.remove(match)
    return pairs


def _same_layout(a: torch.fx.Node, b: torch.fx.Node) -> bool:
    """Return whether two values have the same shape, strides, dtype and device."""
    x = a.meta["val"]
    y = b.meta["val"]
    return (x.shape, x.stride(), x.dtype, x.device) == (y.shape, y.stride(), y.dtype, y.device)
