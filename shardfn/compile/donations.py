"""Which result of a program is written into the memory of which donated argument."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..capture.aten_views import memory_of
from ..types import LocalProgram


def donations(program: LocalProgram, donated: Sequence[int]) -> dict[int, int]:
    """Output position -> placeholder position of a donated input with the same local layout.

    An output that already lies in the memory of an input gets no donated memory. Another output
    might be written over it first.
    """
    free = list(donated)
    holders = program.graph.find_nodes(op="placeholder")
    results = program.graph.find_nodes(op="output")[0].args[0]
    made_of = [memory_of(node) for node in results]
    free = [i for i in free if holders[i] not in made_of]
    pairs: dict[int, int] = {}
    for o, node in enumerate(results):
        match = next((i for i in free if _alike(holders[i], node)), None)
        if match is not None and made_of[o] not in holders and made_of.index(made_of[o]) == o:
            pairs[o] = match
            free.remove(match)
    return pairs


def _alike(a: torch.fx.Node, b: torch.fx.Node) -> bool:
    x = a.meta["val"]
    y = b.meta["val"]
    return (x.shape, x.stride(), x.dtype, x.device) == (y.shape, y.stride(), y.dtype, y.device)
