"""The preparation of the compiler, in the background while the first program is captured: the
processor's instruction set, and the header of all kernels. Every program needs them.
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
class Start:
    """Whether this process has begun."""

    lock: threading.Lock = attrs.field(factory=threading.Lock)
    thread: threading.Thread | None = None


_start = Start()


def prepare_compiler() -> threading.Thread:
    """Have the compiler prepared, once in a process, by a thread. A compilation that comes
    earlier waits for what it needs.
    """
    with _start.lock:
        if _start.thread is None:
            _start.thread = threading.Thread(
                target=_prepare,
                args=(_place(),),
                name="shardfn prepares the compiler",
                daemon=False,  # a process that ends must not leave a compiler at work
            )
            _start.thread.start()
    return _start.thread


def _place() -> str | None:
    """The folder of the header. It imports Inductor in the thread of the call, which imports more
    of it meanwhile.
    """
    try:
        return header_folder()
    except FAILURES as error:
        log.info("the compiler is not prepared: %s", error)
        return None


def _prepare(place: str | None) -> None:
    try:
        if place is not None:
            _compile_header(place)
    except FAILURES as error:  # the compilation that needs it says so
        log.info("the compiler is not prepared: %s", error)
    load_native()


def _compile_header(place: str) -> None:
    """Compile the header, unless the folder of compilations says that this machine has it."""
    where = own_folder()
    about = f"{_compat.compiler_facts()}\n{place}"
    name = f"header-{hashlib.sha256(about.encode()).hexdigest()}"
    if where is not None and where.read(name) is not None:
        return
    compile_header()
    if where is not None:
        where.write(name, b"compiled")
