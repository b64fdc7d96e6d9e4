"""Names that a function looks up and does not find, or finds in a second place, as a name of its
globals among Python's builtins. A name that is added in the first place would be read from then on.
"""

from __future__ import annotations

import builtins
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from ... import _compat
from .read_paths import Path, is_library, own_names

ABSENT = "DICT_NOT_CONTAINS"  # Dynamo's guard
NAMES = "NAMES"  # the guard that an object has the same names
# functions and attributes by which code asks for names without an exception
REFLECTION = frozenset(("getattr", "hasattr", "vars", "dir", "callable", "__dict__"))
MAPPINGS = (dict, types.MappingProxyType)
OPEN = (types.SimpleNamespace, types.FunctionType, types.ModuleType, type)
THROUGH_CLASS = ["mro", "item", "typedict", "item"]  # the last steps to an attribute of a base


def of_earlier_classes(path: Path) -> Iterator[_compat.Read]:
    """Yield the reads of classes that an attribute was looked up in before it was found."""
    if [kind for kind, _ in path[-4:]] == THROUGH_CLASS:
        bases, found, name = path[:-3], path[-3][1], path[-1][1]
        for n in range(found):
            yield _compat.Read((*bases, ("item", n), ("typedict", None)), ABSENT, name)


def of_globals(fn: types.FunctionType) -> Iterator[_compat.Read]:
    """Yield the reads of the globals that a function does not have, and finds in the builtins."""
    if is_library(fn):
        return
    scope = (("scope", _compat.Itself(fn.__globals__)),)
    for name in sorted(words_of(fn.__code__) & vars(builtins).keys() - fn.__globals__.keys()):
        yield _compat.Read(scope, ABSENT, name)


def classes_of_closure(fn: types.FunctionType) -> Iterator[tuple[Path, type]]:
    """Yield the classes that a function closes over, with their paths."""
    scope = (("scope", _compat.Itself(fn)), ("closure", None))
    for n, cell in enumerate(() if is_library(fn) else fn.__closure__ or ()):
        path = (*scope, ("item", n), ("cell", None))
        if isinstance(x := content_of(cell), type):
            yield path, x


def content_of(cell: types.CellType) -> Any:
    """Return the value of a variable of a closure; None of one that has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def words_of(code: types.CodeType) -> set[str]:
    """Collect the names and texts in the code of a function."""
    inner = [x for x in code.co_consts if isinstance(x, types.CodeType)]
    texts = {x for x in code.co_consts if isinstance(x, str)}
    return texts.union(code.co_names, *map(words_of, inner))


class Lookups:
    """How the functions of a program ask for names that may be absent.

    Args:
        reads: the reads of the program.
        functions: the functions that were read.
    """

    def __init__(
        self, reads: Iterable[_compat.Read], functions: Iterable[types.FunctionType]
    ) -> None:
        errors = [read.key for read in reads if read.kind == _compat.CAUGHT]
        codes = [fn.__code__ for fn in functions if not is_library(fn)]
        self.words = frozenset().union(*map(words_of, codes))
        self.of_items = any(issubclass(error, LookupError) for error in errors)
        self.of_attributes = (
            any(issubclass(error, AttributeError) for error in errors)
            or any(read.path[-1:] == (("attr", "__getattr__"),) for read in reads)
            or not REFLECTION.isdisjoint(self.words)
        )

    def may_miss(self, x: Any) -> bool:
        """Whether the functions may have asked an object for a name that it does not have."""
        if isinstance(x, MAPPINGS):
            return self.of_items
        if isinstance(x, (torch.Tensor, torch.nn.Module)) or is_library(x):
            return False
        return self.of_attributes and (isinstance(x, OPEN) or not is_library(type(x)))

    def words_for(self, x: Any) -> frozenset[str] | None:
        """Return the names that count in an object; None if all do."""
        return self.words if isinstance(x, types.ModuleType) else None

    def of_metaclass(self, path: Path, x: Any) -> Iterator[_compat.Read]:
        """Yield the reads of the attributes that a class has from its metaclass, and those of
        its own and its bases that would come first.
        """
        meta: type = type(x)
        if not isinstance(x, type) or is_library(meta):
            return
        kinds = [*enumerate(meta.__mro__)]
        kinds = [(n, kind) for n, kind in kinds if not is_library(kind)]
        methods = [f for _, kind in kinds for f in vars(kind).values()]
        called = (words_of(f.__code__) for f in methods if isinstance(f, types.FunctionType))
        words = self.words.union(*called)  # Dynamo runs __instancecheck__ and does not read it
        for n, kind in kinds:
            for name in sorted(words & vars(kind).keys()):
                place = (("type", None), ("mro", None), ("item", n), ("typedict", None))
                yield _compat.Read((*path, *place, ("item", name)), "CONSTANT_MATCH", None)
                for m in range(len(x.__mro__)):
                    base = (("mro", None), ("item", m), ("typedict", None))
                    yield _compat.Read((*path, *base), ABSENT, name)


def names_in(x: Any, words: Collection[str] | None) -> Any:
    """List the names that can be looked up in an object: keys, or attributes of it and of its
    classes. Of a module, those that the code contains.
    """
    if isinstance(x, MAPPINGS):
        return [*x]
    if isinstance(x, types.ModuleType):
        return [name for name in words or () if name in vars(x)]
    classes = x.__mro__ if isinstance(x, type) else type(x).__mro__
    of_classes = [[*vars(c)] for c in classes if not is_library(c)]
    return [*own_names(x)], of_classes
