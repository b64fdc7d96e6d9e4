"""The detection of repeated blocks of a program, which are compiled only once."""

from .calls import CALL, Kind, known
from .last_calls import split_last_calls
from .outlined import outline

__all__ = ["CALL", "Kind", "known", "outline", "split_last_calls"]
