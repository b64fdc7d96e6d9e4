"""The header that all C++ kernels include, compiled once on a machine."""

from __future__ import annotations

from .folder import own_kernels
from .instructions import instructions_known
from .source import INCLUDE


def header_place() -> str | None:
    """The folder of the compiled header. None where headers are not compiled."""
    from torch._inductor import codecache, config

    if not config.cpp_cache_precompile_headers:
        return None
    with own_kernels():
        return getattr(codecache, "_HEADER_DIR", None)


def compile_header() -> None:
    """Compile the header, which takes several seconds, unless this machine has it.

    Raises:
        OSError: the compiler, or a folder to write to, is missing.
        RuntimeError: the compiler fails.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    with (
        own_kernels(),
        instructions_known(),
    ):  # torch compiles the header before it submits a kernel
        CppPythonBindingsCodeCache.load_async(INCLUDE, submit_fn=lambda _: None)
