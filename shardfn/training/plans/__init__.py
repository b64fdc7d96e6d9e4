"""Placements of all parameters of a model: by pattern, by plan, or fully sharded."""

from .by_pattern import placements
from .fully_sharded import fsdp
from .strategies import Strategy, strategy

__all__ = ["Strategy", "fsdp", "placements", "strategy"]
