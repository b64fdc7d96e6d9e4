"""Stage 1, capture: Python in, a Program of global shapes out."""

from ._capture import Captured, capture

__all__ = ["Captured", "capture"]
