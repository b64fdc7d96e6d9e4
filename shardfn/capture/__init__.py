"""Stage 1, capture: Python in, a Program of global shapes out."""

from ._capture import Captured, capture
from .constants import constant_key
from .module_call import PureModule
from .reads import Reads, name_of

__all__ = ["Captured", "PureModule", "Reads", "capture", "constant_key", "name_of"]
