"""Compilation stage 5, run: the arguments of a call, the call of the compiled program, and the
simulator.
"""

from . import cache
from .backward.followed import Followed
from .compiled import Compiled
from .dispatch import call, explain_retrace
from .needs import Needs, attempt
from .options import Around, Request
from .stages import Lowered, Traced, compiled_for, prepare, trace

__all__ = [
    "Around",
    "Compiled",
    "Followed",
    "Lowered",
    "Needs",
    "Request",
    "Traced",
    "attempt",
    "cache",
    "call",
    "compiled_for",
    "explain_retrace",
    "prepare",
    "trace",
]
