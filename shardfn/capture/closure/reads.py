"""The reads of a captured function outside of its arguments, and whether they would give the
same now.

Dynamo records each global, closure variable, default, attribute and item that it has read. Each
becomes one identity test in one compiled expression, which is the only cost of a call. Values
are compared only if that fails.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ... import _compat
from .absent_names import (
    ABSENT,
    MAPPINGS,
    NAMES,
    Lookups,
    classes_of_closure,
    names_in,
    of_earlier_classes,
    of_globals,
)
from .constant_keys import constant_key, is_constant
from .read_paths import (
    MISSING,
    Path,
    depends_on_world,
    is_fixed,
    is_inside_library,
    is_library,
    own_names,
    root_object,
    step_to,
    stored_place,
    value_at,
)

SOFT = {  # guards that any object of the same type passes if the reads from it are equal
    "TYPE_MATCH",
    "SEQUENCE_LENGTH",
    "DICT_KEYS_MATCH",
    "DICT_CONTAINS",
    "DICT_NOT_CONTAINS",
    "NOT_PRESENT_IN_GENERIC_DICT",
    NAMES,
    "HASATTR",
    "CONSTANT_MATCH",
    "EQUALS_MATCH",
}
LONG = 100  # a longer list or dict is data
SETTINGS = (torch.is_grad_enabled,)  # functions whose result is a constant of the program


class Reads:
    """The places outside of its arguments that a function has read, and the objects that were
    there.

    Args:
        fn: the function, from which closures and bound objects are reached.
        reads: the reads from `_compat.capture_python`.
    """

    def __init__(self, fn: Callable[..., Any], reads: Iterable[_compat.Read]) -> None:
        self.fn = fn
        self.asks_world = False
        self.values: dict[Path, Any] = {}
        # the class of each object that may get another, with its bases
        self.classes: dict[Path, tuple[type, ...]] = {}
        # places that hold the same object as long as their container lives
        self.fixed: set[Path] = set()
        # guard, its key, its value at capture
        self.answers: dict[Path, list[tuple[str, Any, Any]]] = {}
        reads = [*reads]
        for read in reads:
            for each in (*of_earlier_classes(read.path), read):
                self._note(each)
        self._note_absent(reads)
        self.check = self._compiled()

    def _note_absent(self, reads: Sequence[_compat.Read]) -> None:
        """Note the names that would be found if they were added."""
        owners = [self.values.get(read.path[:-1]) for read in reads if read.kind == "CODE"]
        functions = [fn for fn in owners if isinstance(fn, types.FunctionType)]
        for read in (read for fn in functions for read in of_globals(fn)):
            self._note(read)
        lookups = Lookups(reads, functions)
        classes = [row for fn in functions for row in classes_of_closure(fn)]
        for path, x in [*self.values.items(), *classes]:
            for read in lookups.of_metaclass(path, x):
                self._note(read)
        for path, x in [*self.values.items()]:
            if lookups.may_miss(x):
                self._note(_compat.Read(path, NAMES, lookups.words_for(x)))

    def _note(self, read: _compat.Read) -> None:
        if read.kind == _compat.CAUGHT:
            return
        for n in range(1, len(read.path) + 1):
            path = read.path[:n]
            if path not in self.values and not self._found(path):
                return
        x = self.values[read.path]
        kind = "SETTING" if any(x is setting for setting in SETTINGS) else read.kind
        self.answers.setdefault(read.path, []).append(
            (kind, read.key, _guard_value(x, kind, read.key))
        )

    def _found(self, path: Path) -> bool:
        """Look up the object at a path. Returns whether it exists and is not inside a library."""
        (kind, to), before = path[-1], path[:-1]
        if not before:
            value = root_object(kind, to, self.fn)
            fixed = True
            if value is None or is_inside_library(value):
                return False
        else:
            x = self.values[before]
            # a function of a library may close over one of the user's
            is_open = isinstance(x, types.ModuleType) or kind == "closure"
            if is_library(x) and not is_open:
                return False
            try:
                value = step_to(x, kind, to)
            except MISSING:
                return False
            fixed = is_library(x) or is_fixed(x, kind, to, value)
        self.asks_world |= depends_on_world(value)
        self.values[path] = value
        if _has_own_class(value):
            self.classes[path] = type(value).__mro__
        self.fixed |= {path} if fixed else set()
        return True

    def _compiled(self) -> Callable[[], bool] | None:
        """Compile one expression that is true while each place still has the object that was read.
        None without places.
        """
        names: dict[str, Any] = {}

        def bound(x: Any) -> str:
            names[f"x{len(names)}"] = x
            return f"x{len(names) - 1}"

        terms: dict[Any, str] = {}
        absent: dict[int, tuple[Any, list[Any]]] = {}
        for path, value in self.values.items():
            if path not in self.fixed:
                owner, kind, to = stored_place(self.values[path[:-1]], *path[-1])
                terms.setdefault(
                    (id(owner), kind, repr(to)), _identity(owner, kind, to, value, bound)
                )
            for kind, key, answer in self.answers.get(path, ()):
                if kind == ABSENT and answer is False and isinstance(value, MAPPINGS):
                    absent.setdefault(id(value), (value, []))[1].append(key)
                elif answer is not None:
                    term = _guard_test(value, kind, key, answer, bound)
                    terms.setdefault((id(value), kind, repr(key)), term)
        for number, (value, keys) in absent.items():
            term = f"{bound(value)}.keys().isdisjoint({bound(frozenset(keys))})"
            terms[number, ABSENT] = term
        if not terms:
            return None
        terms |= self._class_terms(bound)
        return eval(
            f"lambda: {' and '.join(terms.values())}", names
        )  # an expression of one test for each place

    def _class_terms(self, bound: Callable[[Any], str]) -> dict[Any, str]:
        """The tests that objects have the classes that they had, and these their bases."""
        rows = {
            id(self.values[path]): (self.values[path], mro) for path, mro in self.classes.items()
        }
        if not rows:
            return {}
        objects, bases = zip(*rows.values(), strict=True)
        classes = [mro[0] for mro in bases]
        tests = [f"[*map(type, {bound(objects)})] == {bound(classes)}"]
        tests += [f"{bound(mro[0])}.__mro__ is {bound(mro)}" for mro in dict.fromkeys(bases)]
        return {"classes": " and ".join(tests)}

    def with_those_of(self, other: Reads) -> Reads:
        """These reads together with the reads of a function that this one calls.

        Dynamo records only one of several places that lead to one tensor.
        """
        root = ("scope", _compat.Itself(other.fn))
        both = Reads(self.fn, ())
        both.asks_world = self.asks_world or other.asks_world
        for reads in (self, other):
            is_own = reads is self
            for path, value in reads.values.items():
                is_rooted = path[0] == ("fn", None) and not is_own
                place = (root, *path[1:]) if is_rooted else path
                both.values.setdefault(place, value)
                if path in reads.classes:
                    both.classes.setdefault(place, reads.classes[path])
                both.fixed |= {place} if path in reads.fixed else set()
                answers = both.answers.setdefault(place, [])
                answers += reads.answers.get(path, ())
        both.check = both._compiled()
        return both

    def same(self) -> bool:
        """Whether all places that were read still give the same. A new object counts as unchanged
        if the reads from it are equal.
        """
        try:
            if self.check is None or self.check():
                return True
        except MISSING:
            pass
        if self.changed():
            return False
        self.check = self._compiled()
        return True

    def changed(self) -> list[tuple[Path, Any, Any]]:
        """The places whose value has changed, with the old and the new value."""
        now: dict[Path, Any] = {}
        wrong: list[tuple[Path, Any, Any]] = []
        for path, old in self.values.items():
            before = path[:-1]
            if before and before not in now:
                continue  # its container has changed already
            try:
                # a view of the attributes of a class is made anew each time
                is_view = path[-1][0] == "typedict" and now[before] is self.values[before]
                new = step_to(now[before], *path[-1]) if before and not is_view else old
                answers = self.answers.get(path, ())
                alike = _gives_equal_reads(old, new, {kind for kind, _, _ in answers})
                alike = alike and type(new).__mro__ is self.classes.get(path, type(new).__mro__)
                alike = alike and all(_guard_value(new, kind, key) == x for kind, key, x in answers)
            except MISSING:
                new = None
                alike = False
            if alike:
                now[path] = new
            else:
                wrong.append((path, old, new))
        if not wrong:
            self.values = now
        return wrong

    def is_lost(self) -> bool:
        """Whether an object that was read is gone from its place, so that the entry is unlikely
        to be used again.
        """
        if self.check is None or self.same():
            return False
        return not all(is_constant(old) for _, old, _ in self.changed())


def reads_of_constants(functions: Iterable[Any]) -> list[_compat.Read]:
    """The constants in globals and closures of functions that Dynamo keeps as one call.

    Args:
        functions: functions of modules that Dynamo does not trace. Functions of libraries are
            skipped.
    """
    reads: list[_compat.Read] = []
    for fn in functions:
        fn = getattr(fn, "__func__", fn)
        if isinstance(fn, types.FunctionType) and not is_library(fn):
            reads.append(_compat.read_of_code(fn))
            for path in _constant_paths(fn):
                reads += _reads_of(path, value_at(path))
    return reads


def _reads_of(path: Path, x: Any, depth: int = 2) -> list[_compat.Read]:
    """The reads of the constants at a path, which may be in a short list or dict."""
    if is_constant(x):
        return [_compat.Read(path, "CONSTANT_MATCH", None)]
    if not isinstance(x, (list, dict)) or not depth:
        return []
    if len(x) > LONG:
        return []
    reads: list[_compat.Read] = []
    items = x.items() if isinstance(x, dict) else enumerate(x)
    for key, value in items:
        if is_constant(key):
            reads += _reads_of((*path, ("item", key)), value, depth - 1)
    return reads


def _constant_paths(fn: types.FunctionType) -> list[Path]:
    code = fn.__code__
    scope = ("scope", _compat.Itself(fn.__globals__))
    cells = (("scope", _compat.Itself(fn)), ("closure", None))
    paths: list[Path] = [
        (scope, ("item", name)) for name in code.co_names if name in fn.__globals__
    ]
    paths += [(*cells, ("item", i), ("cell", name)) for i, name in enumerate(code.co_freevars)]
    kinds = (list, dict)
    values = [(path, value_at(path)) for path in paths]
    return [path for path, x in values if is_constant(x) or isinstance(x, kinds)]


def _has_own_class(x: Any) -> bool:
    """Whether an object may get another class: the object of a user's class, or a module."""
    is_own = isinstance(x, torch.nn.Module) or not is_library(type(x))
    return is_own and not isinstance(x, (type, types.ModuleType))


def _identity(x: Any, kind: str, to: Any, value: Any, bound: Callable[[Any], str]) -> str:
    """The source text of a test that a place still has the identical object."""
    owner = bound(x)
    expected = bound(value)
    if kind == "cell":
        return f"{owner}.cell_contents is {expected}"
    if kind == "attr":
        return f"{owner}.{to} is {expected}"
    if kind == "item":
        plain = not isinstance(x, dict) or type(x).__getitem__ is dict.__getitem__
        found = f"{owner}[{bound(to)}]" if plain else f"dict.__getitem__({owner}, {bound(to)})"
        return f"{found} is {expected}"
    return f"{bound(step_to)}({owner}, {kind!r}, {to!r}) is {expected}"


def _guard_value(x: Any, kind: str, key: Any) -> Any:
    """What one of Dynamo's guards compares: the length, the keys, the shape of an object. None if
    identity suffices.
    """
    if kind == "TENSOR_MATCH" and isinstance(x, torch.Tensor):
        return x.shape, x.dtype, x.requires_grad, strides_of(x)
    if kind == "SPARSE_MATCH":
        return x.requires_grad, _compat.version_of(x)
    if kind == "SETTING":
        return x()
    if kind in LENGTH and not isinstance(x, tuple):
        return len(x)
    if kind in ALL_KEYS:
        return [*x]
    if kind == NAMES:
        return names_in(x, key)
    if kind in CONTAINS:
        return key in x
    if kind == "NOT_PRESENT_IN_GENERIC_DICT":
        return key in own_names(x)
    if kind == "HASATTR":
        return hasattr(x, key)
    return frozenset(x) if isinstance(x, set) else None


ALL_KEYS = ("DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK")
LENGTH = ("SEQUENCE_LENGTH", "EMPTY_NN_MODULE_HOOKS_DICT")
CONTAINS = ("DICT_CONTAINS", "DICT_NOT_CONTAINS", "SET_CONTAINS", "SET_NOT_CONTAINS")


def strides_of(x: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides of a tensor; None if it has none."""
    return x.stride() if x.layout is torch.strided else None


def _guard_test(x: Any, kind: str, key: Any, answer: Any, bound: Callable[[Any], str]) -> str:
    """The source text of a test that what a guard compares is unchanged."""
    name = bound(x)
    if kind == "TENSOR_MATCH":
        shape, dtype, requires_grad, strides = answer
        meta = f"{name}.shape == {bound(shape)} and {name}.dtype is {bound(dtype)}"
        if strides is not None:
            meta += f" and {name}.stride() == {bound(strides)}"
        return f"{meta} and {name}.requires_grad is {requires_grad}"
    if kind == "SPARSE_MATCH":
        return f"({name}.requires_grad, {bound(_compat.version_of)}({name})) == {answer}"
    if kind == "SETTING":
        return f"{name}() is {answer}"
    if kind in LENGTH:
        return f"len({name}) == {answer}" if answer else f"not {name}"
    if kind == NAMES:
        return f"{bound(names_in)}({name}, {bound(key)}) == {bound(answer)}"
    if kind in ALL_KEYS:
        return f"[*{name}] == {bound(answer)}"
    if kind in CONTAINS:
        return f"({bound(key)} in {name}) is {answer}"
    if kind == "NOT_PRESENT_IN_GENERIC_DICT":
        return f"({bound(key)} in {bound(own_names(x))}) is {answer}"
    if kind == "HASATTR":
        return f"hasattr({name}, {key!r}) is {answer}"
    return f"{name} == {bound(answer)}"


def _gives_equal_reads(old: Any, new: Any, kinds: set[str]) -> bool:
    """Whether a new object at a place gives equal reads to the old one, as far as the objects
    themselves show.
    """
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if is_constant(old):
        return constant_key(old) == constant_key(new)
    if isinstance(old, types.FunctionType):
        # its defaults and closure are separate places, but for those of a library
        is_open = not (is_library(old) and old.__closure__)
        is_same = old.__code__ is new.__code__ and old.__globals__ is new.__globals__
        return is_open and is_same
    hard = isinstance(old, (torch.Tensor, types.ModuleType, type)) or not kinds
    return not hard and kinds <= SOFT
