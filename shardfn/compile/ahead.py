"""Prepare Inductor's C++ compiler in the background while the first program is captured: read the
processor's instruction set, and compile the header that all kernels include.
"""

from __future__ import annotations

import hashlib
import logging
import threading

import attrs

from .. import _compat
from .._compat.cpp_kernels.header import compile_header, header_folder, import_header_compiler
from ..stored import own_folder
from .native import FAILURES, load_native

log = logging.getLogger("shardfn")


@attrs.define(eq=False)
class PreparationState:
    """The thread that prepares the compiler in this process, if it has started."""

    lock: threading.Lock = attrs.field(factory=threading.Lock)
    thread: threading.Thread | None = None


_preparation = PreparationState()


def prepare_compiler() -> threading.Thread:
    """Start the thread that prepares the compiler, once in a process. A compilation that comes
    earlier waits for what it needs.
    """
    with _preparation.lock:
        if _preparation.thread is None:
            _preparation.thread = threading.Thread(
                target=_prepare,
                args=(_missing_header(),),
                name="shardfn prepares the compiler",
                daemon=False,  # a process that ends must not leave a compiler at work
            )
            _preparation.thread.start()
    return _preparation.thread


def _missing_header() -> str | None:
    """Return the name in the disk cache of a header that this machine has not compiled, or None.
    This imports what compiles it in the caller's thread: a process that forks while another thread
    imports leaves its child without the end of that import, and a module that nobody can load.
    """
    try:
        header = header_folder()
        if header is None:
            return None
        name = _name(header)
        folder = own_folder()
        if folder is not None and folder.read(name) is not None:
            return None
        import_header_compiler()
    except FAILURES as error:
        log.info("C++ header was not precompiled: %s", error)
        return None
    return name


def _name(header: str) -> str:
    facts = f"{_compat.compiler_facts()}\n{header}"
    return f"header-{hashlib.sha256(facts.encode()).hexdigest()}"


def _prepare(header: str | None) -> None:
    """Compile the header and load the C++ functions: the body of the thread."""
    try:
        if header is not None:
            compile_header()
            folder = own_folder()
            if folder is not None:
                folder.write(header, b"compiled")
    except FAILURES as error:  # the compilation that needs it says so
        log.info("C++ header was not precompiled: %s", error)
    load_native()
