"""Devices other than the CPU: which one a process runs on, and CUDA's graphs."""

from .devices import numbered, unnumbered
from .graphs import CudaGraph, copy_all

__all__ = ["CudaGraph", "copy_all", "numbered", "unnumbered"]
