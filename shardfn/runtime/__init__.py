"""Stage 5, run: arguments, the call path, the simulator."""

from . import cache
from .compiled import Compiled
from .dispatch import call
from .options import Request
from .stages import Lowered, Traced, trace

__all__ = ["Compiled", "Lowered", "Request", "Traced", "cache", "call", "trace"]
