"""The work of the threads of this process: the stage, the line of the user, the collective."""

from __future__ import annotations

import linecache
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType

from ..errors import is_inside, is_users, source_at
from ..ops.pipeline import doing

# folders of shardfn, and what runs there
STAGES = {
    "capture": "capture",
    "partition": "partition",
    "schedule": "schedule",
    "compile": "compile",
    "checkpoints": "a checkpoint",
    "jobs": "a comparison between ranks",
}
OWN = "shardfn"  # the names of our threads begin so
_ASSIGNED = re.compile(r"\s*(\w+) = ")


def stage() -> tuple[str | None, str | None]:
    """The stage that a thread of this process is in, and the user's line. None for none."""
    own = {x.ident for x in threading.enumerate() if x.name.startswith(OWN)}
    for thread, frame in sys._current_frames().items():
        frames = list(_outward(frame))
        if thread in own or not _of_call(frames):
            continue
        places = [_folder(x) for x in frames]
        inner = next((STAGES[x] for x in places if x in STAGES), "a call")
        return inner, _users(frames)
    return None, None


def running(code: CodeType, sends: Mapping[str, str]) -> tuple[str | None, str | None]:
    """The user's line, and the collective or the pipeline's instruction, of the thread that runs a
    program.

    Args:
        code: of the function around the program.
        sends: what each node of the program sends, by its name.
    """
    for frame in sys._current_frames().values():
        frames = list(_outward(frame))
        at = next((k for k, x in enumerate(frames) if x.f_code is code), None)
        if at is not None:
            return _users(frames[at:]), _collective(frames[:at], sends)
    return None, None


def _line(frame: FrameType) -> int | None:
    """The line that a frame is at; None at an instruction that no line made."""
    line: int | None = frame.f_lineno  # its type says int
    return line


def _of_call(frames: list[FrameType]) -> bool:
    return any(is_inside(x.f_code.co_filename) for x in frames) and any(
        is_users(x.f_code.co_filename) for x in frames
    )


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _folder(frame: FrameType) -> str | None:
    file = frame.f_code.co_filename
    parts = file.rsplit("/shardfn/", 1)[-1].split("/")
    if not is_inside(file) or len(parts) == 1:
        return None
    return parts[1] if parts[0] == "training" else parts[0]


def _users(frames: list[FrameType]) -> str | None:
    """The user's line: the innermost one outside of shardfn's own frames."""
    first = next((k for k, x in enumerate(frames) if is_inside(x.f_code.co_filename)), 0)
    for frame in frames[first:]:
        if is_users(frame.f_code.co_filename):
            return source_at(frame.f_code.co_filename, _line(frame) or frame.f_code.co_firstlineno)
    return None


def _collective(frames: list[FrameType], sends: Mapping[str, str]) -> str | None:
    """The instruction of a pipeline; or the collective of a line of generated code: known by its
    node, or by the name of the op.
    """
    instruction = doing(frames)
    if instruction is not None:
        return instruction
    for frame in frames:
        line = linecache.getline(frame.f_code.co_filename, _line(frame) or 0)
        assigned = _ASSIGNED.match(line)
        if assigned and assigned[1] in sends:
            return sends[assigned[1]]
        if "_c10d_functional" in line or "shardfn" in line:
            return next(iter(sends.values())) if len(sends) == 1 else line.strip()
    return None
