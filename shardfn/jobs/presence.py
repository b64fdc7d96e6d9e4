"""Where a process of the job is, and whether it is alive, as a process of the same host sees it."""

from __future__ import annotations

import os
import socket
from typing import Any

STOPPED = ("T", "t")  # states of a process that a signal or a debugger has stopped
ENDED = ("Z", "X")  # of one that has ended and was not waited for


def here() -> dict[str, Any]:
    """The place of this process, as JSON."""
    return {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "space": _space(),
        "start": _stat(os.getpid())[1],
    }


def _space() -> str | None:
    """The name of this process's numbers of processes: containers have their own."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _stat(process: int) -> tuple[str | None, str | None]:
    """The state and the time of the start of a process of this host. None where there is none."""
    try:
        with open(f"/proc/{process}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None, None
    return fields[0], fields[19]


def state_of(place: dict[str, Any]) -> str | None:
    """The state of a process: "runs", "stopped" or "ended". None if only its own host can tell.

    Args:
        place: what `here` has returned there.
    """
    mine = _space()
    if mine is None or (place["space"], place["host"]) != (mine, socket.gethostname()):
        return None
    state, start = _stat(place["process"])
    if state is None or state in ENDED or start != place["start"]:
        return "ended"
    return "stopped" if state in STOPPED else "runs"


def is_done(status: Any, *, serves: bool) -> bool:
    """Whether a process has ended.

    Args:
        status: what it has published last; None for nothing.
        serves: whether this process serves the store, which the other may not read any more.
    """
    if status is None:
        return False
    left = status["left"]
    if left and (left["read"] or not serves):
        return True
    return state_of(status["place"]) == "ended"
