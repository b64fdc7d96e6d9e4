"""Files that other processes see complete, or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

PARTIAL = ".partial-"  # how the name of a file begins while it is written


def write(path: str | Path, data: bytes, *, keep: bool = False) -> None:
    """Write a file. Whatever fails, no part of it stays.

    Args:
        path: of the file.
        data: its bytes.
        keep: whether a file that is there already stays.

    Raises:
        OSError: it cannot be written.
    """
    folder = os.path.dirname(os.path.abspath(path))
    handle, partial = tempfile.mkstemp(prefix=PARTIAL, dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if keep:
            with contextlib.suppress(FileExistsError):
                os.link(partial, path)
        else:
            os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(partial)
