"""What was captured and compiled for which call, and how often; rules of users are in
partition/rule_api/registry.py.

A function carries the store of what was made from it, so the two are forgotten together.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .. import state
from ..capture import constant_key
from ..mesh import is_over
from .options import Request
from .store import CallStore, FunctionStore

counts: collections.Counter[str] = (
    collections.Counter()
)  # captures, partitions, compilations
CARRIED = "_shardfn_kept"  # the name under which a function carries its store
PROGRAMS = 64  # how many of one function are kept; the oldest are forgotten first
# how many callables that cannot carry a store are kept alive with theirs; the oldest are
# forgotten first
ALIVE = 128


_writing = (
    threading.RLock()
)  # any thread may ask for a request; what is captured, the one that stages
_taken: set[int] = set()  # donated arguments of the calls at work, by id
_alive: collections.OrderedDict[int, FunctionStore] = collections.OrderedDict()
_stores: weakref.WeakSet[CallStore | FunctionStore] = weakref.WeakSet()
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
        known = _store_of(fn).requests
        known[:] = [row for row in known if not is_over(row[2].mesh)]
        for transform, other, found in known:
            if transform is kind and other == key:
                return found
        made = make()
        _stores.add(made.store)
        known.append((kind, key, made))
        return made


def programs(request: Request) -> list[Any]:
    """What was captured of one function: it depends on no placement, and on a mesh only where
    it says so.
    """
    if not isinstance(request.fn, types.FunctionType):
        return request.store.programs
    with _writing:
        return _store_of(request.fn).programs


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
    """Forget all that can be made again; the next call captures and compiles again."""
    state.clear()


def _store_of(fn: Any) -> FunctionStore:
    can_carry = hasattr(fn, "__dict__") and type(fn).__weakrefoffset__ != 0
    if isinstance(fn, (types.MethodType, type, torch.nn.Module)) or not can_carry:
        return _store_alive(fn)
    found = fn.__dict__.get(CARRIED)
    if found is None or found.owner() is not fn:
        found = fn.__dict__[CARRIED] = FunctionStore(weakref.ref(fn))
        _stores.add(found)
    return found


def _store_alive(fn: Any) -> FunctionStore:
    if id(fn) not in _alive:
        _alive[id(fn)] = FunctionStore(
            lambda: fn
        )  # alive, so that its id stays its own
        _stores.add(_alive[id(fn)])
    _alive.move_to_end(id(fn))
    while len(_alive) > ALIVE:
        _alive.popitem(last=False)
    return _alive[id(fn)]
