"""Tracebacks of errors that leave shardfn: the frames of the user, without torch's and shardfn's
own. Modelled on jax's traceback filtering.
"""

from __future__ import annotations

import functools
import os
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import _compat
from .errors import ShardError, is_inside, is_ours

FULL = "SHARDFN_TRACEBACK"  # set to "full", it keeps all frames
FAULT = "shardfn: a fault of shardfn's own, not of your function: please report it"
MANY = 3  # frames, from which on a traceback points at lines without carets
# classes of errors that ops of torch do not raise
OF_PYTHON = (AssertionError, AttributeError, KeyError, NameError, TypeError)


def is_full() -> bool:
    """Whether the user wants all frames."""
    return os.environ.get(FULL) == "full"


def shown(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Have the errors of a function that users call show their frames only."""

    @_compat.read_by_dynamo
    @functools.wraps(fn)
    def outermost(*args: Any, **kwargs: Any) -> Any:
        if _compat.is_tracing() or _compat.inside_transform():
            return fn(*args, **kwargs)
        try:
            return fn(*args, **kwargs)
        except BaseException as error:
            show(error)
            raise

    return outermost


def show(error: BaseException) -> None:
    """Prepare an error for the user: with the user's frames only, and with what the running torch
    lacks.
    """
    hide_frames(error)
    lacks = _compat.degraded() if isinstance(error, Exception) else []
    if lacks:
        error.add_note(f"this torch, {_compat.TORCH_VERSION}, lacks {'; '.join(lacks)}")


def hide_frames(error: BaseException) -> None:
    """Take the frames of torch and of shardfn out of the traceback of an error, and of those that
    led to it. A fault of shardfn's own keeps its frames.
    """
    if is_full():
        return
    if is_fault(error):
        note_fault(error)
    if FAULT in getattr(error, "__notes__", ()):
        return
    seen: dict[int, BaseException] = {}
    queue: list[BaseException] = [error]
    while queue:
        error = queue.pop()
        if id(error) in seen:
            continue
        seen[id(error)] = error
        error.__traceback__ = users_frames(error.__traceback__)
        if _is_of_torch(error.__cause__):
            error.__cause__ = None
        if _is_of_torch(error.__context__):
            error.__context__ = None
        inside = getattr(error, "exceptions", ()) if isinstance(error, BaseExceptionGroup) else ()
        queue += [x for x in (error.__cause__, error.__context__, *inside) if x is not None]
    every = [[*_each(error.__traceback__)] for error in seen.values()]
    if len(every) > 1 or sum(map(len, every)) >= MANY:
        for error, frames in zip(seen.values(), every, strict=True):
            error.__traceback__ = _chained(frames, has_carets=False)


def users_frames(frames: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback without the frames of torch and of shardfn."""
    kept = [x for x in _each(frames) if not is_ours(x.tb_frame.f_code.co_filename)]
    return _chained(kept, has_carets=len(kept) < MANY)


def _each(frames: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while frames is not None:
        yield frames
        frames = frames.tb_next


def _chained(
    frames: Sequence[types.TracebackType], *, has_carets: bool
) -> types.TracebackType | None:
    """The traceback of some frames."""
    result = None
    for each in reversed(frames):
        place = each.tb_lasti if has_carets else -1  # without a place there are no carets
        result = types.TracebackType(result, each.tb_frame, place, each.tb_lineno)
    return result


def _is_of_torch(error: BaseException | None) -> bool:
    """Whether an error is of torch's tracing, which says nothing to users."""
    return error is not None and (
        type(error).__module__.startswith("torch.") or users_frames(error.__traceback__) is None
    )


def is_fault(error: BaseException) -> bool:
    """Whether an error of a call is a fault of shardfn's own: Python raised it in a line of
    shardfn's.
    """
    return isinstance(error, OF_PYTHON) and not is_noted(error) and is_from_here(error)


def is_from_here(error: BaseException) -> bool:
    """Whether an error comes from a function of shardfn's, or from one that it has called, and
    says nothing of the user.
    """
    if isinstance(error, ShardError) or _compat.is_of_tracing(error):
        return False
    frames = traceback.walk_tb(error.__traceback__)
    files = [frame.f_code.co_filename for frame, _ in frames]
    while files and not is_ours(files[-1]):
        files.pop()
    return bool(files) and is_inside(files[-1])


def note_fault(error: BaseException) -> None:
    """Say of an error that it is a fault of shardfn's own."""
    note_once(error, FAULT)


def note_once(error: BaseException, note: str) -> None:
    """Add a note to an error that has none of shardfn's."""
    if not is_noted(error):
        error.add_note(note)


def is_noted(error: BaseException) -> bool:
    """Whether an error has a note of shardfn's."""
    return any(str(note).startswith("shardfn: ") for note in getattr(error, "__notes__", ()))
