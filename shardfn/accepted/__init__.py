"""The types that public functions and methods accept: one row a parameter, and the check."""

from .check import accept, described

__all__ = ["accept", "described"]
