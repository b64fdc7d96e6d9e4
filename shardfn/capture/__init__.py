"""Stage 1, capture: Python in, a Program of global shapes out."""

from ._capture import Captured, capture
from .module_call import PureModule

__all__ = ["Captured", "PureModule", "capture"]
