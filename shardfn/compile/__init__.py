"""Stage 4, compile: turns a local graph into a callable."""

from .backends import BACKENDS, Runner, aten, inductor

__all__ = ["BACKENDS", "Runner", "aten", "inductor"]
