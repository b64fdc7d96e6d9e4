"""A simulated world and its mesh; a tensor of which each rank has its own."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import shardfn as sf
from shardfn.simulated import SimulatedTensor

__all__ = ["SimulatedTensor", "simulated"]


@contextlib.contextmanager
def simulated(**axes: int) -> Iterator[Any]:
    """The mesh of all ranks of a simulated world: `with simulated(dp=2, tp=4) as mesh:`."""
    with sf.fake_world(math.prod(axes.values())):
        yield sf.make_mesh(tuple(axes.values()), tuple(axes))
