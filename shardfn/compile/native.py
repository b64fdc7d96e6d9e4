"""The loader of the C++ functions of a call: read from the disk cache, or compiled in the
background.
"""

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
class LoadState:
    """The thread that loads the C++ functions in this process, if it has started."""

    lock: threading.Lock = attrs.field(factory=threading.Lock)
    thread: threading.Thread | None = None


_loading = LoadState()


def load_native() -> threading.Thread | None:
    """Start the thread that loads the C++ functions, once in a process. Python's functions run
    until then, and if loading fails. Return None where C++ is turned off.
    """
    if not _compat.library.is_wanted():
        return None
    with _loading.lock:
        if _loading.thread is None:
            _loading.thread = threading.Thread(
                target=_load,
                name="shardfn compiles the C++ functions of the call path",
                daemon=False,  # a process that ends must not leave a compiler at work
            )
            _loading.thread.start()
    return _loading.thread


def _load() -> None:
    """Load the library, and log a failure: the body of the thread."""
    try:
        if not _load_or_compile():
            log.info("the C++ functions of the call path do not work with this torch")
    except FAILURES as error:
        log.info("calls use Python's functions alone: %s", error)


def _load_or_compile() -> bool:
    """Load the library from the disk cache, or compile and store it; return whether it loaded.
    Without a cache folder there is none.
    """
    folder = own_folder()
    if folder is None:
        return False
    name = _compat.library.library_name()
    binary = folder.read(name)
    if binary is None:
        with folder.alone(name):  # another process may be compiling it
            binary = folder.read(name)
            if binary is None:
                binary = _compat.library.compiled_library()
                folder.write(name, binary)
    return _compat.library.load_library(binary)
