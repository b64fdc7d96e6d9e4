"""Placements of many parameters in one line: by patterns, from plans, fully sharded."""

from .by_pattern import placements
from .fully_sharded import fsdp
from .strategies import Strategy, strategy

__all__ = ["Strategy", "fsdp", "placements", "strategy"]
