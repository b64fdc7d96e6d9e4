"""The caches of torch that grow with each program of a process, within bounds."""

from __future__ import annotations

import contextlib
import functools
import linecache
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import graph_module

ANSWERS = 4096  # of fake tensors; some 2 kB each
FEW = 256  # graphs whose code is not counted
CHARACTERS = 1 << 22  # of the code of graphs; the oldest is dropped first


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Bound torch's caches afterwards. torch makes up again what it misses; a traceback through the
    code of an old graph has no lines.
    """
    try:
        yield
    finally:
        if len(FakeTensorMode.cache) > ANSWERS:
            FakeTensorMode.cache_clear()
        _drop_old_code()


def _drop_old_code() -> None:
    codes = graph_module._loader.eval_cache
    if len(codes) < FEW:
        return
    more = sum(map(len, list(codes.values()))) - CHARACTERS
    for name in list(codes):
        if more <= 0:
            return
        more -= len(codes.pop(name, ""))
        linecache.cache.pop(name, None)


def settings(config: Any, **changes: Any) -> AbstractContextManager[Any]:
    """`config.patch(changes)`, made once. torch makes a context variable for each, and a thread's
    context keeps every variable that was set in it (torch 2.13).

    Args:
        config: a module of torch's settings.
        changes: those to change. Names that this torch does not have, or warns of as without
            effect, are left out.
    """
    known = {name: x for name, x in changes.items() if _is_read(config, name)}
    return _changed(config, tuple(sorted(known.items())))


def _is_read(config: Any, name: str) -> bool:
    entry = config._config.get(name)
    return entry is not None and not getattr(entry, "deprecated", False)  # torch 2.15


@functools.cache
def _changed(config: Any, changes: tuple[tuple[str, Any], ...]) -> Any:
    return config.patch(dict(changes))
