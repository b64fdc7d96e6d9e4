"""`memory_as_run`: the memory of a program as its backend runs it, op by op or in Inductor's fused
kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from torch.fx import Graph

from ..inspect.memory import Memory, MemoryPeaks, memory
from ..types import LocalProgram
from .donations import donations
from .kernels import Kernels
from .recomputed import recompute_cheap_values


def memory_as_run(program: LocalProgram, backend: str, donated: Sequence[int] = ()) -> Memory:
    """Return the memory of one rank's program as its backend runs it.

    Args:
        program: one rank's program.
        backend: "aten" runs it op by op; "inductor" recomputes cheap values, fuses kernels, and
            writes results into donated arguments.
        donated: the places of the donated arguments among the placeholders.
    """
    if backend != "inductor":
        return memory(program)
    graph = recompute_cheap_values(program.graph)
    pairs = donations(program, donated)

    def moments(inner: Graph) -> MemoryPeaks:
        return Kernels(inner, pairs if inner is graph else {}).live_by_function()

    return memory(attrs.evolve(program, graph=graph), moments)
