"""Stage 4, compile: turns a local graph into a callable."""

from .backends import BACKENDS, Runner, aten, inductor
from .sized import Families

__all__ = ["BACKENDS", "Families", "Runner", "aten", "inductor"]
