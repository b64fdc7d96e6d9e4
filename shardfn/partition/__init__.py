"""Stage 2, partition: a global Program and placements in, the graph of one rank out."""

from . import layout
from .emit import emit, local_sizes
from .plan import plan
from .steps import Plan

__all__ = ["Plan", "emit", "layout", "local_sizes", "plan"]
