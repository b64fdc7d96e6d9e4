"""What was captured and compiled for which call, and how often; rules of users are in
partition/rule_api/registry.py.

A function carries the record of what was made from it, so the two are forgotten together.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs
import torch

from ..capture import constant_key
from ..mesh import is_over
from .options import Request

counts: collections.Counter[str] = (
    collections.Counter()
)  # captures, partitions, compilations
CARRIED = "_shardfn_kept"  # the name under which a function carries its record
PROGRAMS = 64  # how many of one function are kept; the oldest are forgotten first
# how many callables that cannot carry a record are kept alive with theirs; the oldest are
# forgotten first
ALIVE = 128


@attrs.frozen(eq=False)
class Kept:
    """What was asked of one function, and the programs that were captured from it."""

    owner: Callable[
        [], Any
    ]  # whose: a copy of the function finds this record too, and is to make its own
    requests: list[tuple[Any, Any, Request]] = attrs.field(
        factory=list
    )  # and transform, options
    programs: list[Any] = attrs.field(factory=list)

    def __reduce__(self) -> Any:
        return Kept, (_nobody,)

    def __deepcopy__(self, memo: Any) -> Kept:
        return Kept(_nobody)


_writing = (
    threading.RLock()
)  # any thread may ask for a request; what is captured, the one that stages
_taken: set[int] = set()  # donated arguments of the calls at work, by id
_alive: collections.OrderedDict[int, Kept] = collections.OrderedDict()
_all_kept: weakref.WeakSet[Kept] = weakref.WeakSet()
_all_requests: weakref.WeakSet[Request] = weakref.WeakSet()
_prepared: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def request(
    kind: Any, fn: Any, options: Any, make: Callable[[], Request]
) -> Request:
    """One request for one transform of one function with equal options, however often the
    transform is written out.
    """
    key = constant_key(
        options
    )  # meshes by identity: equal ones may be of another world, or have other links
    with _writing:
        known = _kept(fn).requests
        known[:] = [row for row in known if not is_over(row[2].mesh)]
        for transform, other, found in known:
            if transform is kind and other == key:
                return found
        made = make()
        _all_requests.add(made)
        known.append((kind, key, made))
        return made


def programs(request: Request) -> list[Any]:
    """What was captured of one function: it depends on no placement, and on a mesh only where
    it says so.
    """
    if not isinstance(request.fn, types.FunctionType):
        return request.programs
    with _writing:
        return _kept(request.fn).programs


def prepared(program: Any, prepare: Callable[[Any], Any]) -> Any:
    """What the simulator runs for a local program, made once."""
    found = _prepared.get(program)
    if found is None:
        found = _prepared[program] = prepare(program)
    return found


@contextlib.contextmanager
def claimed(tensors: Iterable[Any]) -> Iterator[bool]:
    """Tensors that a call takes away while it runs; False if another thread's call is taking
    one.
    """
    mine = {id(x) for x in tensors}
    with _writing:
        free = not mine & _taken
        if free:
            _taken.update(mine)
    try:
        yield free
    finally:
        if free:
            with _writing:
                _taken.difference_update(mine)


def clear() -> None:
    """Forget everything; the next call captures and compiles anew."""
    for kept in list(_all_kept):
        kept.requests.clear()
        kept.programs.clear()
    for made in list(_all_requests):
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
