"""Traceback filtering, as in JAX: the traceback of an error shows the user's frames, without the
frames of torch and shardfn.
"""

from __future__ import annotations

import functools
import linecache
import os
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import _compat
from .errors import ShardError, is_inside, is_ours, user_frame

FULL = "SHARDFN_TRACEBACK"  # set to "full", it keeps all frames
RUN = "shardfn: raised while"  # begins the note on an error of a program that runs
FAULT = "shardfn: this is a bug in shardfn, not in your function: please report it"
MANY = 3  # frames, from which on a traceback has carets only under parts of long lines
LINES = 12  # of a traceback, to which the frames of a deep function are shortened
# classes of errors that ops of torch do not raise
OF_PYTHON = (AssertionError, AttributeError, KeyError, NameError, TypeError)


def is_full() -> bool:
    """Return whether the user wants all frames (SHARDFN_TRACEBACK=full)."""
    return os.environ.get(FULL) == "full"


def filter_errors(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a public function so that its errors show the user's frames only."""

    @_compat.read_by_dynamo
    @functools.wraps(fn)
    def outermost(*args: Any, **kwargs: Any) -> Any:
        if _compat.is_tracing() or _compat.inside_transform():
            return fn(*args, **kwargs)
        try:
            return fn(*args, **kwargs)
        except BaseException as error:
            prepare_error(error)
            raise

    return outermost


def prepare_error(error: BaseException) -> None:
    """Hide the frames of shardfn and torch in an error, and note which places this torch lacks."""
    hide_frames(error)
    lacks = _compat.degraded() if isinstance(error, Exception) else []
    if lacks:
        error.add_note(f"this torch, {_compat.TORCH_VERSION}, lacks {'; '.join(lacks)}")


def hide_frames(error: BaseException) -> None:
    """Remove the frames of torch and of shardfn from the traceback of an error, and of those that
    led to it. A fault of shardfn's own keeps its frames.
    """
    if is_full():
        return
    if is_fault(error):
        note_fault(error)
    if FAULT in getattr(error, "__notes__", ()):
        return
    errors = _without_our_frames(error)
    every = [[*_links_of_traceback(each.__traceback__)] for each in errors]
    if len(every) > 1 or sum(map(len, every)) >= MANY:
        for each, frames in zip(errors, every, strict=True):
            each.__traceback__ = _traceback_of(frames, has_carets=False)


def note_users(error: BaseException, name: str) -> None:
    """Note on an error of the user's function which transform reads it, and shorten its frames
    to the first and the last ones.

    Args:
        error: the error.
        name: of the transformed function.
    """
    if has_our_note(error):
        return
    count = 0
    if not is_full():
        lines = _lines_left(error)
        for each in _without_our_frames(error):
            count += _shorten(each, lines)
            lines = 0  # for the errors that led to this one
    rest = f", {count} of its frames are hidden" if count else ""
    error.add_note(f"shardfn: raised inside {name}{rest}; {FULL}=full shows all frames")


def note_run(error: BaseException, name: str, at: str) -> None:
    """Note on an error which program has raised it while it ran, and at which op."""
    error.add_note(f"{RUN} {name} ran{at}; {FULL}=full shows all frames")


def is_of_run(error: BaseException) -> bool:
    """Return whether a program has raised an error while it ran."""
    return any(str(note).startswith(RUN) for note in getattr(error, "__notes__", ()))


def _lines_left(error: BaseException) -> int:
    """Return how many lines of a traceback are left for the frames of the user's function, after
    the frames that lead to it, the text and the note.
    """
    frame = user_frame()
    callers = 1
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
        callers += 1
    text = "".join(traceback.format_exception_only(error)).count("\n")
    return LINES - 1 - 3 * callers - text - 1


def _shorten(error: BaseException, lines: int) -> int:
    """Keep the first and the last frames of an error, as many as that many lines hold but at
    least two, and return the number of the others.
    """
    frames = [*_links_of_traceback(error.__traceback__)]
    costs = [3 if _place_of_line(x) is None else 2 for x in frames]
    shown = len(frames)
    while shown > 2 and costs[0] + sum(costs[1 - shown :]) > lines:
        shown -= 1
    left_out = len(frames) - shown
    if left_out:
        frames = [frames[0], *frames[1 - shown :]]
        error.__traceback__ = _traceback_of(frames, has_carets=False)
    return left_out


def _without_our_frames(error: BaseException) -> list[BaseException]:
    """Remove the frames of torch and of shardfn from an error and from those that led to it, and
    return all of them, the error first.
    """
    seen: dict[int, BaseException] = {}
    queue: list[BaseException] = [error]
    while queue:
        error = queue.pop()
        if id(error) in seen:
            continue
        seen[id(error)] = error
        error.__traceback__ = user_frames(error.__traceback__)
        if _is_of_torch(error.__cause__):
            error.__cause__ = None
        if _is_of_torch(error.__context__):
            error.__context__ = None
        inside = getattr(error, "exceptions", ()) if isinstance(error, BaseExceptionGroup) else ()
        queue += [x for x in (error.__cause__, error.__context__, *inside) if x is not None]
    return [*seen.values()]


def user_frames(frames: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback without the frames of torch and of shardfn."""
    links = [x for x in _links_of_traceback(frames) if not is_ours(x.tb_frame.f_code.co_filename)]
    return _traceback_of(links, has_carets=True)


def _links_of_traceback(frames: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while frames is not None:
        yield frames
        frames = frames.tb_next


def _traceback_of(
    frames: Sequence[types.TracebackType], *, has_carets: bool
) -> types.TracebackType | None:
    """Build the traceback of some frames."""
    result = None
    for each in reversed(frames):
        place = None if has_carets else _place_of_line(each)
        place = each.tb_lasti if place is None else place
        result = types.TracebackType(result, each.tb_frame, place, each.tb_lineno)
    return result


def _place_of_line(link: types.TracebackType) -> int | None:
    """Return the place of an instruction that is a whole line of source, under which Python draws
    no carets, or None.
    """
    code, line = link.tb_frame.f_code, link.tb_lineno
    text = linecache.getline(code.co_filename, line).encode().rstrip()
    extent = line, line, len(text) - len(text.lstrip()), len(text)
    places = (2 * i for i, position in enumerate(code.co_positions()) if position == extent)
    return next(places, None)


def _is_of_torch(error: BaseException | None) -> bool:
    """Return whether an error comes from torch's tracing, which says nothing to users."""
    return error is not None and (
        type(error).__module__.startswith("torch.") or user_frames(error.__traceback__) is None
    )


def is_fault(error: BaseException) -> bool:
    """Return whether an error is a fault of shardfn's own: Python raised it in a line of
    shardfn's.
    """
    return isinstance(error, OF_PYTHON) and not has_our_note(error) and is_raised_by_shardfn(error)


def is_raised_by_shardfn(error: BaseException) -> bool:
    """Return whether an error comes from a function of shardfn's, or from one that it has called,
    and says nothing of the user.
    """
    if isinstance(error, ShardError) or _compat.is_of_tracing(error):
        return False
    frames = traceback.walk_tb(error.__traceback__)
    files = [frame.f_code.co_filename for frame, _ in frames]
    while files and not is_ours(files[-1]):
        files.pop()
    # a call from this file that raises has not entered its function: its arguments do not fit
    return bool(files) and is_inside(files[-1]) and files[-1] != __file__


def note_fault(error: BaseException) -> None:
    """Note on an error that it is a fault of shardfn's own."""
    if not has_our_note(error):
        error.add_note(FAULT)


def has_our_note(error: BaseException) -> bool:
    """Return whether an error has a note of shardfn's."""
    return any(str(note).startswith("shardfn: ") for note in getattr(error, "__notes__", ()))
