"""The types that public functions and methods accept, in a table with one row per parameter, and
the type check.
"""

from .check import accept, described

__all__ = ["accept", "described"]
