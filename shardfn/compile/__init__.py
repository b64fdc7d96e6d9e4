"""Stage 4, compile: turn a local graph into a callable, with Inductor or op by op."""

from .backends import BACKENDS, Runner, aten, inductor
from .sized import Families

__all__ = ["BACKENDS", "Families", "Runner", "aten", "inductor"]
