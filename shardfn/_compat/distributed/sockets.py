"""Sockets of process groups, shut down to end Gloo's waits for ranks that do not answer (its
`abort` does nothing in torch 2.13).
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

FOLDER = "/proc/self/fd"
# what Gloo and torch's stores say of a rank that does not answer, in lower case
TOLD = ("gloo/transport", "gloo::", "connection closed by peer", "timed out waiting")


def _open() -> set[tuple[int, int]]:
    """List this process's open sockets as (file descriptor, inode). Empty outside of Linux."""
    found = set[tuple[int, int]]()
    numbers = os.listdir(FOLDER) if os.path.isdir(FOLDER) else []
    for number in map(int, numbers):
        with contextlib.suppress(OSError):  # closed meanwhile
            state = os.fstat(number)
            if stat.S_ISSOCK(state.st_mode):
                found.add((number, state.st_ino))
    return found


@contextlib.contextmanager
def sockets_noted(found: set[tuple[int, int]]) -> Iterator[None]:
    """Collect into a set the sockets that are opened inside a context."""
    before = _open()
    try:
        yield
    finally:
        found |= _open() - before


def shut_down(sockets: set[tuple[int, int]], store: Any) -> None:
    """Shut down sockets that are still open, except a store's, so that a wait on them fails.

    Args:
        sockets: the number and the inode of each.
        store: whose connections are left alone.
    """
    port = _port(store)
    for number, _ in sockets & _open():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as s:
            # a socket that listens has no peer; Gloo would abort the process without it
            if port not in (s.getpeername()[1], s.getsockname()[1]):
                s.shutdown(socket.SHUT_RDWR)


def _port(store: Any) -> int | None:
    """Return the TCP port of a store. None for one of files."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "port", None)


def tells_of_ranks(error: BaseException) -> bool:
    """Check whether an error is of a collective that other ranks did not answer."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(x in text for x in TOLD)
