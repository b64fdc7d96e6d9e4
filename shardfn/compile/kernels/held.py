"""The memory of a program as a backend runs it."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from torch.fx import Graph

from ...inspect.memory import Memory, Moments, memory
from ...types import LocalProgram
from ..donations import donations
from ..recomputed import recomputed
from .copied_inputs import with_copies
from .steps import inductor_steps


def memory_as_run(program: LocalProgram, backend: str, donated: Sequence[int] = ()) -> Memory:
    """The memory of one rank's program.

    Args:
        program: one rank's program.
        backend: "aten" runs it op by op; "inductor" recomputes cheap values, fuses kernels, and
            writes results into donated arguments.
        donated: the places of the donated arguments among the placeholders.
    """
    if backend != "inductor":
        return memory(program)
    graph = with_copies(recomputed(program.graph))
    taken = donations(program, donated)

    def moments(inner: Graph) -> Moments:
        if inner is graph:
            return inductor_steps(inner, taken)
        return inductor_steps(with_copies(inner))

    return memory(attrs.evolve(program, graph=graph), moments)
