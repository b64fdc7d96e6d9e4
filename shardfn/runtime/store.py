"""The mutable state that the runtime keeps between calls. Frozen records hold one of these
objects.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from .. import _compat


@attrs.define(eq=False)
class CallStore:
    """The cached entries of one Request, and notes about its calls."""

    # the last used first; replaced as a tuple, because other threads read it
    entries: tuple[Any, ...] = ()
    # captured programs of a function that cannot carry them
    programs: list[Any] = attrs.field(factory=list)
    # the requests for this function with its gradients, by the tensors that autograd follows
    followed: dict[Any, Any] = attrs.field(factory=dict)
    # compiled programs with what they were lowered from, the last one first
    compiled: list[Any] = attrs.field(factory=list)
    # lowered programs that are in use, each with the rules of users that held
    lowered: weakref.WeakKeyDictionary[Any, Any] = attrs.field(factory=weakref.WeakKeyDictionary)
    # the last time that a new signature was staged, explained
    retrace: str = ""
    # how often a constant has changed, by path; each is warned of once
    changes: dict[str, int] = attrs.field(factory=dict)

    # what was called expensive in a program
    expensive: set[str] = attrs.field(factory=set)
    # the plans that were looked at for it
    weighed: weakref.WeakSet[Any] = attrs.field(factory=weakref.WeakSet)

    # the stores of the same function for other placements, where each has a request of its own
    kin: weakref.WeakSet[CallStore] = attrs.field(factory=weakref.WeakSet)

    def every(self) -> tuple[Any, ...]:
        """The cached entries of this store and of the stores that share its function."""
        others = [e for store in self.kin if store is not self for e in store.entries]
        return (*self.entries, *others)

    def put_first(self, entry: Any) -> None:
        """Try this entry first in the next call."""
        others = [other for other in self.entries if other is not entry]
        self.entries = (entry, *others)

    def clear(self) -> None:
        """Drop the cached entries and the programs. Warnings that were given are not repeated."""
        self.entries = ()
        self.programs.clear()
        self.followed.clear()
        self.compiled.clear()
        self.lowered.clear()


@attrs.define(eq=False)
class FunctionStore:
    """The requests that were made for one function, and the programs captured from it."""

    # a copy of a function finds the store of the original, and must make its own
    owner: Callable[[], Any]
    # (transform, key of its options, request)
    requests: list[tuple[Any, Any, Any]] = attrs.field(factory=list)
    programs: list[Any] = attrs.field(factory=list)

    def clear(self) -> None:
        """Drop both."""
        self.requests.clear()
        self.programs.clear()

    def __reduce__(self) -> Any:
        return FunctionStore, (_nobody,)

    def __deepcopy__(self, memo: Any) -> FunctionStore:
        return FunctionStore(_nobody)


def _nobody() -> None:
    """Stand in for the owner of a copied store."""


@attrs.define(eq=False)
class Stages:
    """Hold the programs of a pipeline's stages that were lowered, by number."""

    programs: dict[int, Any] = attrs.field(factory=dict)


@attrs.define(eq=False)
class Compared:
    """Note whether the ranks have compared the arguments of a compiled program."""

    is_done: bool = False


@attrs.define(eq=False)
class Earlier:
    """Hold the donated argument objects of a program's last call, emptied of memory."""

    _calls: list[Sequence[Any]] = attrs.field(factory=list, init=False)  # at most one

    def put(self, tensors: Sequence[Any]) -> None:
        """Replace the objects by those of a newer call."""
        self._calls[:] = [tensors]

    def take(self) -> Sequence[Any] | None:
        """Hand the objects of the last call to one caller."""
        try:
            return self._calls.pop()
        except IndexError:
            return None


@attrs.define(eq=False)
class Layouts:
    """Remember the layouts of the tensors that ranks compared last."""

    _check: Callable[[list[Any]], bool] | None = attrs.field(default=None, init=False)

    def put(self, tensors: Sequence[Any]) -> None:
        """Remember the layouts of these tensors from now on."""
        self._check = _compat.calls.SameTensors(tensors)

    def are_same(self, tensors: list[Any]) -> bool:
        """Return whether tensors have the remembered layouts; False if only a
        comparison can tell.
        """
        return self._check is not None and self._check(tensors)
