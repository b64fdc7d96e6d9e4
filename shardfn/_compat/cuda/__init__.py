"""Devices other than the CPU: which one a process runs on, and CUDA's graphs."""

from .devices import numbered, unnumbered

__all__ = ["numbered", "unnumbered"]
