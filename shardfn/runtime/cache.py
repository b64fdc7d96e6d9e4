"""The caches of captures and compiled programs, and their counters. Users' rules are in
partition/rule_api/registry.py.

A function carries the store of its programs, so both are freed together.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import state
from ..capture import Template, constant_key
from ..compile import Families
from ..mesh import is_of_ended_world
from .options import Request
from .store import CallStore, FunctionStore

counts: collections.Counter[str] = (
    collections.Counter()
)  # captures, replays, partitions, compilations
CARRIED = "_shardfn_kept"  # the name under which a function carries its store
PROGRAMS = 64  # programs kept for one function; the oldest are dropped first
# how many callables that cannot carry a store are kept alive with theirs; the oldest are
# forgotten first
ALIVE = 128


_writing = threading.RLock()  # any thread may add a request; only the staging thread adds captures
_taken: list[set[int]] = []  # donated arguments of each call at work, by id
_alive: collections.OrderedDict[int, FunctionStore] = collections.OrderedDict()
_stores: weakref.WeakSet[CallStore | FunctionStore] = weakref.WeakSet()
_prepared: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_families: weakref.WeakKeyDictionary[Template, Families] = weakref.WeakKeyDictionary()


def request(kind: Any, fn: Any, options: Any, make: Callable[[], Request]) -> Request:
    """Return the Request of one transform of one function, shared by all applications with equal
    options.
    """
    key = constant_key(
        options
    )  # meshes by identity: equal meshes may belong to different worlds, or have different links
    with _writing:
        known = _store_of(fn).requests
        known[:] = [row for row in known if not is_of_ended_world(row[2].mesh)]
        for transform, other, found in known:
            if transform is kind and other == key:
                return found
        made = make()
        _stores.add(made.store)
        known.append((kind, key, made))
        return made


def programs(request: Request) -> tuple[list[Any], Any]:
    """Return the captures of one function, and the key of this request among them. Captures do not
    depend on placements, and on a mesh only if the function does.

    Equal transforms of one function share its captures.
    """
    fn = request.fn
    key = None
    if request.structure is not None:
        fn, transforms = request.structure()
        key = (request.name, transforms) if transforms else None
    if not isinstance(fn, types.FunctionType):
        return request.store.programs, None
    with _writing:
        return _store_of(fn).programs, key


def prepared(program: Any, prepare: Callable[[Any], Any]) -> Any:
    """Prepare the steps that the simulator runs for a local program, once."""
    found = _prepared.get(program)
    if found is None:
        found = _prepared[program] = prepare(program)
    return found


def families(template: Template) -> Families:
    """Return the compiled programs of a function that was captured for many sizes."""
    found = _families.get(template)
    if found is None:
        found = _families[template] = Families()
    return found


@contextlib.contextmanager
def claimed(mine: set[int]) -> Iterator[bool]:
    """Claim the donated tensors of a call, given by id, while it runs. Yields False if a call of
    another thread has claimed one.
    """
    with _writing:
        free = all(map(mine.isdisjoint, _taken))
        if free:
            _taken.append(mine)
    try:
        yield free
    finally:
        if free:
            with _writing:
                _taken[:] = [other for other in _taken if other is not mine]


def is_claimed() -> bool:
    """Return whether a running call, of any thread, has claimed donated tensors."""
    return bool(_taken)


def clear() -> None:
    """Drop all captures and compiled programs. The next call captures and compiles again."""
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
        _alive[id(fn)] = FunctionStore(lambda: fn)  # kept alive, so that its id is not reused
        _stores.add(_alive[id(fn)])
    _alive.move_to_end(id(fn))
    while len(_alive) > ALIVE:
        _alive.popitem(last=False)
    return _alive[id(fn)]
