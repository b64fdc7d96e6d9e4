"""Stage 2, partition: a global Program and placements in, the graph of one rank out."""

from . import layout
from .emission.emit import emit, local_sizes
from .plan import Plan
from .propagate import GLOBAL, PLANNERS, propagate
from .shared_plans import shared_plan

__all__ = [
    "GLOBAL",
    "PLANNERS",
    "Plan",
    "emit",
    "layout",
    "local_sizes",
    "propagate",
    "shared_plan",
]
