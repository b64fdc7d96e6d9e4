"""The C++ functions of a call, for this process: stored ones, or compiled in the background."""

from __future__ import annotations

import logging
import subprocess
import threading

import attrs

from .. import _compat
from ..stored import own_folder

log = logging.getLogger("shardfn")
FAILURES = (OSError, RuntimeError, ImportError, subprocess.SubprocessError)


@attrs.define(eq=False)
class Start:
    """Whether a process has begun to load them."""

    lock: threading.Lock = attrs.field(factory=threading.Lock)
    thread: threading.Thread | None = None


_start = Start()


def load_native() -> threading.Thread | None:
    """Have the C++ functions loaded, once in a process, by a thread. Python's functions run
    until then, and where it fails. None where they are not wanted.
    """
    if not _compat.library.is_wanted():
        return None
    with _start.lock:
        if _start.thread is None:
            _start.thread = threading.Thread(
                target=_load,
                name="shardfn compiles the functions of a call",
                daemon=False,  # a process that ends must not leave a compiler at work
            )
            _start.thread.start()
    return _start.thread


def _load() -> None:
    try:
        if not _stored_or_compiled():
            log.info("the C++ functions of a call do not fit this torch")
    except FAILURES as error:
        log.info("calls use Python's functions alone: %s", error)


def _stored_or_compiled() -> bool:
    """Load the library of this machine. Without a folder to store it in there is none."""
    where = own_folder()
    if where is None:
        return False
    name = _compat.library.library_name()
    binary = where.read(name)
    if binary is None:
        with where.alone(name):  # another process may be compiling it
            binary = where.read(name)
            if binary is None:
                binary = _compat.library.compiled_library()
                where.write(name, binary)
    return _compat.library.load_library(binary)
