"""One thread captures and compiles at a time, and its patches of torch affect that thread only."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from ..errors import ShardError

ORIGINAL = "_shardfn_original"  # of an overridden function: torch's own
_CAPTURING: contextvars.ContextVar[bool] = contextvars.ContextVar("capturing", default=False)
_table = threading.Lock()  # guards the next line
_replaced: dict[
    tuple[int, str], tuple[int, Any]
] = {}  # the number of users, and the original value
_home = os.getpid()


@contextlib.contextmanager
def staging() -> Iterator[None]:
    """Acquire the re-entrant lock under which one thread at a time traces, lowers and compiles.

    The lock is that of torch.compile, since Dynamo, its settings and fx's metadata are global
    to the process.

    Raises:
        ShardError: this process was forked while another thread held the lock, so nothing will
            release it.
    """
    from torch._dynamo.convert_frame import compile_lock

    if not compile_lock.acquire(blocking=not _is_lost()):
        fix = "fork before the first call, or use multiprocessing's spawn"
        got = (
            "the process was forked while a thread was compiling, and that compilation cannot "
            "finish here"
        )
        raise ShardError.of("this process", got, fix=fix)
    try:
        yield
    finally:
        compile_lock.release()


def _is_lost() -> bool:
    """Check whether the lock's holder is gone: this is a forked process without other threads."""
    return os.getpid() != _home and threading.active_count() == 1


def is_capturing() -> bool:
    """Check whether this thread is capturing a function."""
    return _CAPTURING.get()


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Enter a context that marks this thread as capturing.

    Derivatives are taken in this thread too. Autograd has a thread for each GPU, which would not
    count as capturing.
    """
    token = _CAPTURING.set(True)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        _CAPTURING.reset(token)


def only_here() -> Callable[[], bool]:
    """Return a predicate that is true in the calling thread alone."""
    thread = threading.get_ident()
    return lambda: threading.get_ident() == thread


def torchs(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's own function behind one that may be overridden."""
    return getattr(fn, ORIGINAL, fn)


@contextlib.contextmanager
def overridden(
    owner: Any, name: str, new: Callable[..., Any], is_mine: Callable[[], bool]
) -> Iterator[None]:
    """Replace a function or method of torch for the calls that satisfy a predicate. Other calls
    run torch's function.

    Args:
        owner: the module or class.
        name: the name of the function.
        new: takes torch's function, and then its arguments.
        is_mine: called for each call; whether to use `new` for it.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        if is_mine():
            return new(original, *args, **kwargs)
        return original(*args, **kwargs)

    chosen.__dict__[ORIGINAL] = torchs(original)
    bound = (staticmethod, classmethod)  # `original` is bound already
    is_bound = isinstance(inspect.getattr_static(owner, name), bound)
    put = staticmethod(chosen) if is_bound else chosen
    with mock.patch.object(owner, name, put):
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute of torch while any thread is inside. The last thread to leave
    restores it.

    Args:
        owner: the module or class.
        name: the name of the attribute.
        make: maps the original value to the replacement, which must check for which thread it
            runs.
    """
    key = id(owner), name
    with _table:
        count, original = _replaced.get(key, (0, None))
        if not count:
            original = getattr(owner, name)
            setattr(owner, name, make(original))
        _replaced[key] = count + 1, original
    try:
        yield
    finally:
        with _table:
            count, original = _replaced.pop(key)
            if count > 1:
                _replaced[key] = count - 1, original
            else:
                setattr(owner, name, original)
