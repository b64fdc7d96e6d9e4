"""What was captured and compiled for which call, and how often; rules of users are in partition/registered.py.

A function carries the record of what was made from it, so the two are forgotten together.
"""

from __future__ import annotations

import collections
import types
import weakref
from collections.abc import Callable
from typing import Any

import attrs
import torch

from ..capture import constant_key
from .request import Request

counts: collections.Counter[str] = collections.Counter()  # captures, partitions, compilations
CARRIED = "_shardfn_kept"  # the name under which a function carries its record
PROGRAMS = 64  # how many of one function are kept; the oldest are forgotten first
ALIVE = 128  # how many callables that cannot carry a record are kept alive with theirs; the oldest are forgotten first


@attrs.frozen(eq=False)
class Kept:
    """What was asked of one function, and the programs that were captured from it."""

    owner: Callable[[], Any]  # whose: a copy of the function finds this record too, and is to make its own
    requests: list[tuple[Any, Any, Request]] = attrs.field(factory=list)  # and transform, options
    programs: list[Any] = attrs.field(factory=list)

    def __reduce__(self) -> Any:
        return Kept, (_nobody,)

    def __deepcopy__(self, memo: Any) -> Kept:
        return Kept(_nobody)


_alive: collections.OrderedDict[int, Kept] = collections.OrderedDict()
_all_kept: weakref.WeakSet[Kept] = weakref.WeakSet()
_all_requests: weakref.WeakSet[Request] = weakref.WeakSet()
_prepared: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def request(kind: Any, fn: Any, options: Any, make: Callable[[], Request]) -> Request:
    """One request for one transform of one function with equal options, however often the transform is written out."""
    known = _kept(fn).requests
    key = constant_key(options)  # a mesh by identity: an equal one may be of another world
    for transform, other, found in known:
        if transform is kind and other == key:
            return found
    made = make()
    _all_requests.add(made)
    known.append((kind, key, made))
    return made


def programs(request: Request) -> list[Any]:
    """What was captured of one function; it depends on no placement."""
    return _kept(request.fn).programs if isinstance(request.fn, types.FunctionType) else request.programs


def prepared(program: Any, prepare: Callable[[Any], Any]) -> Any:
    """What the simulator runs for a local program, made once."""
    if program not in _prepared:
        _prepared[program] = prepare(program)
    return _prepared[program]


def clear() -> None:
    """Forget everything; the next call captures and compiles anew."""
    for kept in _all_kept:
        kept.requests.clear()
        kept.programs.clear()
    for made in _all_requests:
        made.entries.clear()
        made.programs.clear()
    _alive.clear()
    _prepared.clear()
    counts.clear()


def _kept(fn: Any) -> Kept:
    can_carry = hasattr(fn, "__dict__") and type(fn).__weakrefoffset__ != 0
    if isinstance(fn, (types.MethodType, type, torch.nn.Module)) or not can_carry:
        return _kept_alive(fn)
    found = fn.__dict__.get(CARRIED)
    if found is None or found.owner() is not fn:
        found = fn.__dict__[CARRIED] = Kept(weakref.ref(fn))
        _all_kept.add(found)
    return found


def _kept_alive(fn: Any) -> Kept:
    if id(fn) not in _alive:
        _alive[id(fn)] = Kept(lambda: fn)  # alive, so that its id stays its own
        _all_kept.add(_alive[id(fn)])
    _alive.move_to_end(id(fn))
    while len(_alive) > ALIVE:
        _alive.popitem(last=False)
    return _alive[id(fn)]


def _nobody() -> None:
    """Whose record a copy of a function's record is."""
