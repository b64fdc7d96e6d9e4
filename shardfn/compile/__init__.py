"""Compilation stage 4, compile: turn the graph of one rank into a callable, with Inductor or op by
op.
"""

from .backends import BACKENDS, Runner, aten, inductor
from .sized import Families

__all__ = ["BACKENDS", "Families", "Runner", "aten", "inductor"]
