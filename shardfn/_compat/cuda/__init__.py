"""Devices other than the CPU: the choice of the device of a process, and CUDA graphs."""

from .devices import numbered, unnumbered
from .graphs import CudaGraph, copy_all

__all__ = ["CudaGraph", "copy_all", "numbered", "unnumbered"]
