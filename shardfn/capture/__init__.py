"""Compilation stage 1, capture: turn a Python function into a Program with global shapes."""

from .capture import Captured, capture, capture_again, raise_users
from .closure.constant_keys import constant_key, is_constant
from .closure.read_paths import name_of
from .closure.reads import Reads
from .dtensors import uneven_shards
from .dtensors.dtensor_values import placement_of
from .inputs import Arguments
from .modules.module_call import PureModule
from .printing import tensor_type
from .reading.capture_settings import Settings
from .reading.symbolic_sizes import Template

__all__ = [
    "Arguments",
    "Captured",
    "PureModule",
    "Reads",
    "Settings",
    "Template",
    "capture",
    "capture_again",
    "constant_key",
    "is_constant",
    "name_of",
    "uneven_shards",
    "placement_of",
    "raise_users",
    "tensor_type",
]
