"""Placements of many parameters in one line: by patterns, from plans, fully sharded."""

from .by_pattern import placements
from .fully_sharded import fsdp

__all__ = ["fsdp", "placements"]
