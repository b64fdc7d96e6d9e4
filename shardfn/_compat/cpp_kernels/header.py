"""The C++ header that all kernels include, precompiled once on a machine."""

from __future__ import annotations

from .folder import private_kernel_folder
from .instructions import quick_instruction_check
from .source import INCLUDE


def header_folder() -> str | None:
    """Return the folder of the precompiled header. None where torch precompiles no headers."""
    from torch._inductor import codecache, config

    if not config.cpp_cache_precompile_headers:
        return None
    with private_kernel_folder():
        return getattr(codecache, "_HEADER_DIR", None)


def import_header_compiler() -> None:
    """Import what torch imports when it compiles a header."""
    from torch._inductor import codecache  # noqa: F401
    from torch.utils import _cpp_extension_versioner, cpp_extension, file_baton  # noqa: F401


def compile_header() -> None:
    """Precompile the header that kernels include, which takes several seconds, unless it is cached.

    Raises:
        OSError: the compiler, or a folder to write to, is missing.
        RuntimeError: the compiler fails.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    with (
        private_kernel_folder(),
        quick_instruction_check(),
    ):  # torch compiles the header before it submits a kernel
        CppPythonBindingsCodeCache.load_async(INCLUDE, submit_fn=lambda _: None)
