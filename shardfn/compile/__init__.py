"""Stage 4, compile: a local graph in, something that runs out."""

from .backends import BACKENDS, Runner, aten, inductor

__all__ = ["BACKENDS", "Runner", "aten", "inductor"]
