"""Stage 1, capture: Python in, a Program of global shapes out."""

from .capture import Captured, capture
from .closure.constants import constant_key
from .closure.reads import Reads, name_of
from .modules.call import PureModule

__all__ = ["Captured", "PureModule", "Reads", "capture", "constant_key", "name_of"]
