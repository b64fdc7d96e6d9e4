"""Stage 4, compile: a local graph in, something that runs out."""

from .backends import BACKENDS, aten, inductor

__all__ = ["BACKENDS", "aten", "inductor"]
