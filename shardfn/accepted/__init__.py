"""The types that public functions accept: one row a parameter, and the check that reads them."""

from .check import accept, described

__all__ = ["accept", "described"]
