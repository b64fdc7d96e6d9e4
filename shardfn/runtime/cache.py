"""All of shardfn's state: what was captured and compiled for which call, and how often."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable
from typing import Any

counts: collections.Counter[str] = collections.Counter()  # captures, partitions, compilations, calls that missed
_programs: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
_prepared: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_entries: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def programs(request: Any) -> list[Any]:
    """(signature, captured) pairs of one transformed function."""
    return _programs.setdefault(request, [])


def entries(request: Any) -> list[Any]:
    """The ready calls of one transformed function, the last used first."""
    found = _entries.get(request)
    return _entries.setdefault(request, []) if found is None else found


def prepared(program: Any, prepare: Callable[[Any], Any]) -> Any:
    """What the simulator runs for a local program, made once."""
    if program not in _prepared:
        _prepared[program] = prepare(program)
    return _prepared[program]


def clear() -> None:
    """Forget everything; the next call captures and compiles anew."""
    _programs.clear()
    _entries.clear()
    _prepared.clear()
    counts.clear()
