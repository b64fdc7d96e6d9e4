"""Repeated blocks of a program: found, and written once for all copies of a kind."""

from .calls import CALL, Kind, known
from .last_calls import split_last_calls
from .outlined import outline

__all__ = ["CALL", "Kind", "known", "outline", "split_last_calls"]
