"""Records of the values that Dynamo read outside of the arguments: the place of each, and the
guard.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

Step = tuple[
    str, Any
]  # a step from one object to another: ("attr", "scale"), ("item", 0), ("cell", "x")


class Itself:
    """Wraps an object to compare and hash it by identity."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


class Read(NamedTuple):
    """One value that was read: the steps that lead to it, and Dynamo's guard on it."""

    path: tuple[
        Step, ...
    ]  # the first one is a root: ("fn", None), ("module", name) or ("scope", an object)
    kind: str  # the name of Dynamo's guard
    key: Any  # the key or attribute of the guard, if it has one


# The class of Dynamo's source (torch 2.11 to 2.15) -> the step, and the attribute that holds its
# key.
STEPS = {
    "AttrSource": ("attr", "member"),
    "GenericAttrSource": ("attr", "member"),
    "ParamBufferSource": ("attr", "member"),
    "UnspecializedParamBufferSource": ("attr", "member"),
    "CellContentsSource": ("cell", "freevar_name"),
    "GetItemSource": ("item", "index"),
    "ListGetItemSource": ("item", "index"),
    "DictGetItemSource": ("item", "index"),
    "DictSubclassGetItemSource": ("item", "index"),
    "ConstDictKeySource": ("key", "index"),
    "ClosureSource": ("closure", None),
    "TypeSource": ("type", None),
    "TypeDictSource": ("typedict", None),
    "TypeMROSource": ("mro", None),
    "NonSerializableSetGetItemSource": ("member", "index"),
    "WeakRefCallSource": ("call", None),
}
SAME = (
    "NNModuleSource",
    "UnspecializedNNModuleSource",
    "UnspecializedBuiltinNNModuleSource",
    "OptimizerSource",
)
ARRAY = "NumpyTensorSource"  # an array that is read as a tensor


def is_array_input(node: Any) -> bool:
    """Check whether an input of Dynamo's graph is a NumPy array that the function reads."""
    return type(getattr(node, "_dynamo_source", None)).__name__ == ARRAY


def outside_reads(out: Any, scope: dict[str, Any]) -> tuple[Read, ...]:
    """List the reads that Dynamo's guards recorded, without those of the arguments.

    Args:
        out: the result of `fullgraph_capture`.
        scope: the globals of the function that was captured.
    """
    guards = out.graph_capture_output.output_graph.guards
    found: dict[Any, Read] = {}
    for guard in guards:
        for read in _reads(guard, scope):
            found.setdefault((read.path, read.kind, repr(read.key)), read)
    return tuple(found.values())


def _reads(guard: Any, scope: dict[str, Any]) -> list[Read]:
    create = guard.create_fn
    key = None
    sources = [guard.originating_source]
    if isinstance(create, functools.partial):
        key = create.keywords.get("key", create.keywords.get("attr"))
        other = create.keywords.get("source_b")  # for two names of one object
        sources += [other] if other is not None else []
        create = create.func
    elif create.__name__ == "HASATTR":  # torch 2.11 guards the attribute
        key, sources = sources[0].member, [sources[0].base]
    paths = [_path(source, scope) for source in sources]
    return [Read(path, create.__name__, key) for path in paths if path is not None]


def _path(source: Any, scope: dict[str, Any]) -> tuple[Step, ...] | None:
    """Build the path of attribute and item steps to a guard's source; None for a source in the
    arguments, or of an unknown class.
    """
    kind = type(source).__name__
    if kind == "LocalSource":
        return (("fn", None),) if source.local_name == "fn" else None
    if kind == "GlobalSource":
        return _root(source.global_name, scope)
    base = getattr(source, "base", None)
    before = None if base is None else _path(base, scope)
    if before is None or kind in SAME:
        return before
    if kind == ARRAY:
        return (*before, ("array", None))
    if kind == "DefaultsSource":
        return (*before, ("attr", source.field), ("item", source.idx_key))
    if kind not in STEPS:
        return None
    step, where = STEPS[kind]
    return _stepped(before, step, getattr(source, where) if where else None, source)


def _stepped(before: tuple[Step, ...], step: str, to: Any, source: Any) -> tuple[Step, ...] | None:
    if step == "item" and getattr(source, "index_is_slice", False):
        return (*before, ("item", source.unpack_slice()))
    if (
        step == "item" and type(to).__name__ == "ConstDictKeySource"
    ):  # the value of a dict's n-th key
        return (*before, ("value", to.index))
    return (*before, (step, to))


def _root(name: str, scope: dict[str, Any]) -> tuple[Step, ...] | None:
    """Find the root object of a global: a recorded module, a dict of globals that belongs to no
    module, or a function.
    """
    found = scope.get(name)
    if name.startswith("__import_") and found is not None:
        return (("module", found.__name__),)
    if name.startswith(("___unnamed_scope", FUNCTION)):
        return (("scope", Itself(found)),)
    return None


FUNCTION = "___function"  # in the name of a global that is a function


def found_again(get: Callable[[Any], Any], function: Any) -> Any:
    """The source of a function. Dynamo has none for a method of a class that a closure, a
    sourceless object or a slot leads to (torch 2.13 to 2.15): it takes what the method closes
    over and its defaults as new, so that no change of them counts, and no guard.
    """
    from torch._dynamo.source import GlobalSource
    from torch._dynamo.symbolic_convert import InstructionTranslator

    source = get(function)
    if source is not None:
        return source
    output = InstructionTranslator.current_tx().output
    name = re.sub(r"\W", "", function.fn.__name__)
    return GlobalSource(output.install_global_by_id(f"{FUNCTION}_{name}", function.fn))


def globals_of(read: Callable[..., Any], translator: Any, name: str) -> tuple[Any, Any, Any]:
    """The globals of a function that Dynamo reads, as a value, a variable and a source: those of
    its module, or a dict of their own where sys.modules has no such module, or another one.
    """
    from torch._dynamo.source import DictGetItemSource, GlobalSource
    from torch._dynamo.variables.builder import VariableBuilder

    scope = translator.f_globals
    module = sys.modules.get(str(scope.get("__name__")))
    is_package = "torch_package" in str(scope.get("__name__"))
    if is_package or (module is not None and vars(module) is scope):
        return read(translator, name)
    source = GlobalSource(translator.output.install_global_by_id("___unnamed_scope", scope))
    variable = VariableBuilder(translator, source)(scope)
    return scope, variable, DictGetItemSource(source, name)


def code_noted(
    memo: Any, bind: Callable[..., Any], function: Any, tx: Any, args: Any, kwargs: Any
) -> Any:
    """The arguments of a function that Dynamo reads. Notes its code, and the place in a class that
    led to it: Dynamo looks at neither again.
    """
    fn = function.fn
    memo.reads.append(read_of_code(fn))
    owner = getattr(function, "obj", None) or next(iter(args), None)
    for nearest, home, name in _homes(_classes_of(owner), fn):
        # another class may come between the nearest one and the function's
        place = nearest if home.__dict__[name] is fn else home
        memo.reads.append(Read((("scope", Itself(place)), ("attr", name)), "METHOD", None))
    return bind(function, tx, args, kwargs)


def _classes_of(variable: Any) -> tuple[type, ...]:
    """Return the class of an object that Dynamo reads; the class that the variable is, and its
    metaclass.
    """
    from torch._dynamo.variables.lazy import LazyVariableTracker

    if variable is None:
        return ()
    try:
        variable = variable.unwrap()
        if isinstance(variable, LazyVariableTracker):
            value = variable.peek_value()
        else:
            value = getattr(variable, "value", None)
            value = variable.python_type() if value is None else value
    except NotImplementedError:
        return ()
    kind = type(value)
    return (value, kind) if isinstance(value, type) else (kind,)


def _homes(classes: Iterable[type], fn: Any) -> Iterator[tuple[type, type, str]]:
    """Find the user's classes in MROs that define a function, with its names there."""
    for nearest in classes:
        for base in nearest.__mro__:
            if (base.__module__ or "").partition(".")[0] not in ("torch", "builtins"):
                for name, x in base.__dict__.items():
                    if x is fn or (isinstance(x, (classmethod, staticmethod)) and x.__func__ is fn):
                        yield nearest, base, name


def read_of_code(fn: Any) -> Read:
    """Read `fn.__code__`, which may be replaced in place."""
    return Read((("scope", Itself(fn)), ("attr", "__code__")), "CODE", None)


def tensor_guards(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A check that other tensors have the classes, shapes, strides, dtypes, devices and
    `requires_grad` of these, in the same order: one call of C++ for all of them, as Dynamo's.
    """
    from torch._C._dynamo.guards import TensorGuards

    shapes: Any = [list(x.shape) for x in tensors]
    strides: Any = [list(x.stride()) for x in tensors]
    guards = TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)
    return guards.check


CAUGHT = "CAUGHT"  # the kind of a read that says which exception the code has caught


def exception_noted(memo: Any, raised: Callable[..., Any], translator: Any, error: Any) -> Any:
    """Note that the code that Dynamo reads raises an exception: it may catch it."""
    kind = getattr(error, "exc_type", None)
    if isinstance(kind, type):
        memo.reads.append(Read((), CAUGHT, kind))
    return raised(translator, error)


PLAIN = type(None), bool, int, float, str


def without_source(call: Callable[..., Any], tx: Any, fn: Callable[..., Any], *args: Any) -> Any:
    """The result of a function that Dynamo runs on constants. Numbers, texts and tuples of them
    have no source: Dynamo cannot make a guard of its own source, as type(x) of it asks for.
    """
    from torch._dynamo.variables.base import VariableTracker

    results = []

    def noted(*given: Any, **named: Any) -> Any:
        results.append(fn(*given, **named))
        return results[0]

    variable = call(tx, noted, *args)
    is_plain = _is_plain(results[0])
    return VariableTracker.build(tx, results[0]) if is_plain else variable


def _is_plain(x: Any) -> bool:
    if type(x) is tuple:
        return all(map(_is_plain, x))
    return type(x) in PLAIN
