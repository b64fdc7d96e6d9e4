"""The memory that a compiler allocates for a program, without compiling it."""

from .held import memory_as_run

__all__ = ["memory_as_run"]
