"""The inspectable stages of a transformed function: Traced and Lowered; compiled.py has the
third.
"""

from .traced import Lowered, Traced, trace

__all__ = ["Lowered", "Traced", "trace"]
