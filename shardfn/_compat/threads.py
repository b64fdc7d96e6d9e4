"""Threads: one of them stages at a time, and what is changed in torch meanwhile is its own."""

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

from ..errors import ShardError, problem

_CAPTURING: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "capturing", default=False
)
_table = threading.Lock()  # who reads or writes the next line
_replaced: dict[
    tuple[int, str], tuple[int, Any]
] = {}  # how many need it, and what stood there
_home = os.getpid()


@contextlib.contextmanager
def staging() -> Iterator[None]:
    """One thread at a time traces, lowers and compiles; the same thread may do so again inside.

    The lock is torch.compile's own: Dynamo, its settings and the notes of fx are the process's.

    Raises:
        ShardError: this process was forked while another thread held the lock, which is never
            released.
    """
    from torch._dynamo.convert_frame import compile_lock

    if not compile_lock.acquire(blocking=not _is_lost()):
        fix = "fork before the first call, or multiprocessing's spawn"
        got = (
            "it was forked while a thread was compiling, which would never be done"
        )
        raise ShardError(problem("this process", got, fix=fix), fix=fix)
    try:
        yield
    finally:
        compile_lock.release()


def _is_lost() -> bool:
    """Whether nobody would release a lock: in a forked process with no other thread than this
    one.
    """
    return os.getpid() != _home and threading.active_count() == 1


def is_capturing() -> bool:
    """Whether this thread, and no other one, is capturing a function."""
    return _CAPTURING.get()


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """What runs inside, in this thread, is part of a capture."""
    token = _CAPTURING.set(True)
    try:
        yield
    finally:
        _CAPTURING.reset(token)


@contextlib.contextmanager
def overridden(
    owner: Any, name: str, new: Callable[..., Any], is_mine: Callable[[], bool]
) -> Iterator[None]:
    """A function or method of torch's replaced, for whoever it is meant; others get torch's.

    Args:
        owner: the module or class.
        name: of the function.
        new: takes torch's own function, and then what that takes.
        is_mine: whether this call is one that is to be changed, asked at each.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        if is_mine():
            return new(original, *args, **kwargs)
        return original(*args, **kwargs)

    bound = (staticmethod, classmethod)  # `original` is bound already
    is_bound = isinstance(inspect.getattr_static(owner, name), bound)
    put = staticmethod(chosen) if is_bound else chosen
    with mock.patch.object(owner, name, put):
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """An attribute of torch replaced while any thread is inside: the last one out puts it back.

    Args:
        owner: the module or class.
        name: of the attribute.
        make: from what stands there, what is to stand there; it asks for whom it runs.
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
