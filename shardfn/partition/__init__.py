"""Compilation stage 2, partition: turn a Program and placements into the graph of one rank."""

from . import layout
from .emission.emit_steps import emit, local_sizes
from .plan import Plan
from .plan_cache import cached_plan
from .propagate import GLOBAL, PLANNERS, propagate

__all__ = [
    "GLOBAL",
    "PLANNERS",
    "Plan",
    "emit",
    "layout",
    "local_sizes",
    "propagate",
    "cached_plan",
]
