"""The stage objects `Traced` and `Lowered` of a transformed function. The third stage object,
`Compiled`, is in compiled.py.
"""

from .preparing import prepare
from .reuse import compiled_for
from .traced import Lowered, Traced, explain_failed, lowered_as, trace, traced_for

__all__ = [
    "Lowered",
    "Traced",
    "compiled_for",
    "explain_failed",
    "lowered_as",
    "prepare",
    "trace",
    "traced_for",
]
