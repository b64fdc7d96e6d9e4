"""Prepare Inductor's C++ compiler in the background while the first program is captured: read the
processor's instruction set, and compile the header that all kernels include.
"""

from __future__ import annotations

import hashlib
import logging
import threading

import attrs

from .. import _compat
from .._compat.cpp_kernels.header import compile_header, header_folder
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
                args=(_header_folder(),),
                name="shardfn prepares the compiler",
                daemon=False,  # a process that ends must not leave a compiler at work
            )
            _preparation.thread.start()
    return _preparation.thread


def _header_folder() -> str | None:
    """Return the folder of the header, or None. This imports Inductor in the caller's thread,
    which imports more of it meanwhile.
    """
    try:
        return header_folder()
    except FAILURES as error:
        log.info("C++ header was not precompiled: %s", error)
        return None


def _prepare(folder: str | None) -> None:
    """Compile the header and load the C++ functions: the body of the thread."""
    try:
        if folder is not None:
            _compile_header(folder)
    except FAILURES as error:  # the compilation that needs it says so
        log.info("C++ header was not precompiled: %s", error)
    load_native()


def _compile_header(header: str) -> None:
    """Compile the header, unless the disk cache says that this machine has it."""
    folder = own_folder()
    facts = f"{_compat.compiler_facts()}\n{header}"
    name = f"header-{hashlib.sha256(facts.encode()).hexdigest()}"
    if folder is not None and folder.read(name) is not None:
        return
    compile_header()
    if folder is not None:
        folder.write(name, b"compiled")
