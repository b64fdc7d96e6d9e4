"""What was captured and compiled for which call, and how often; rules of users are in partition/registered.py."""

from __future__ import annotations

import collections
import types
import weakref
from collections.abc import Callable
from typing import Any

counts: collections.Counter[str] = collections.Counter()  # captures, partitions, compilations
KEPT_REQUESTS = 1024
_requests: collections.OrderedDict[Any, list[tuple[Any, Any]]] = collections.OrderedDict()
_programs: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
_prepared: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_entries: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def request(kind: Any, fn: Any, options: Any, make: Callable[[], Any]) -> Any:
    """One request for one transform of one function with equal options, however often the transform is written out.

    The request keeps fn alive, so that its id stays its own; the oldest functions are forgotten first.
    """
    known = _requests.setdefault((kind, id(fn)), [])
    _requests.move_to_end((kind, id(fn)))
    for other, found in known:
        if other == options:
            return found
    made = make()
    known.append((options, made))
    while len(_requests) > KEPT_REQUESTS:
        _requests.popitem(last=False)
    return made


def programs(request: Any) -> list[Any]:
    """(signature, world, captured) of one function: nothing in them depends on a placement, and on a mesh only where they say so."""
    key = request.fn if isinstance(request.fn, types.FunctionType) else request
    return _programs.setdefault(key, [])


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
    _requests.clear()
    _programs.clear()
    _entries.clear()
    _prepared.clear()
    counts.clear()
