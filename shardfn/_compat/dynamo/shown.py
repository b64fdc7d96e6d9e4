"""Calls of a captured function that show values: Dynamo notes the values and the arguments.

A function of `SHOWS` is not read. Its row gets Python's own objects, with a `Traced` for each
tensor, and returns a function of the graph, a text and tensors to call it with, or None.
"""

from __future__ import annotations

import collections
import functools
import inspect
import logging
import math
import operator
import pprint
import re
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import CaptureError, user_frame
from ..tracing import read_by_dynamo
from .sizes import user_line

QUESTIONS = ("isEnabledFor", "getEffectiveLevel", "hasHandlers")
LEVELS = "debug", "info", "warning", "error", "critical"
LOG_METHODS = (*LEVELS, "exception", "log", "warn", "fatal")
CONTAINERS = list, dict, set, collections.deque
DEPTH = 20  # of containers in arguments
BREAKPOINT = breakpoint  # Python's own
SCALARS = str, int, float, bool
OF_PYTHON = {
    "builtins:print": print,
    "builtins:breakpoint": breakpoint,
    "warnings:warn": warnings.warn,
    "pprint:pprint": pprint.pprint,
}
OPERATORS = "add sub mul truediv floordiv mod pow neg eq ne lt le gt ge"
NUMBERS: dict[str, Callable[..., Any]] = {  # by the name of the function in Dynamo's graph
    **{name: getattr(operator, name) for name in OPERATORS.split()},
    **{"abs": abs, "round": round, "floor": math.floor, "ceil": math.ceil, "_sym_sqrt": math.sqrt},
    **{"sym_float": float, "sym_int": int, "sym_min": min, "sym_max": max},
}
TEXTS = {str: "{!s}", repr: "{!r}"}
FIELD = re.compile(r"%(%|[sr]|[-+ 0#]*\d*(?:\.\d+)?[dfeEgG])")  # of "..." % x
NUMBERED = re.compile(r"{\w")  # a field with a number or a name
ALIGNED = {"ljust": "<", "rjust": ">"}  # the methods of a text that pad it
JOINS = operator.add, operator.iadd
FUNCTIONS = types.FunctionType, types.BuiltinFunctionType, types.MethodType, type


# (file:line, args, kwargs) -> the call
Prepare = Callable[[str, Any, Any], tuple[Callable[..., Any], str, list[Any]] | None]
# by function, or "module:name" of an optional package; `logging.Logger` for a logger's methods
SHOWS: dict[Any, Prepare] = {}


class Traced:
    """A tensor of Dynamo's graph, the number in one, or an array of NumPy that a tensor is for."""

    def __init__(self, proxy: Any, is_number: bool = False, is_array: bool = False) -> None:
        self.proxy, self.is_number, self.is_array = proxy, is_number, is_array


class Delayed:
    """A str.format of values that are not known yet."""

    def __init__(self, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.text, self.args, self.kwargs = text, args, kwargs


class DelayedWarning(Delayed):
    """A Warning whose text has values that are not known yet."""

    def __init__(self, kind: type[Warning], args: tuple[Any, ...]) -> None:
        super().__init__("{}", args, {})
        self.kind = kind


class Computed:
    """A number that Python computes from others, by a function of `NUMBERS`."""

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name, self.args = name, args


def maker_of(kind: type) -> Callable[[Sequence[Any]], Any] | None:
    """Return the function that makes a torch.Size, a named tuple or a result of torch from its
    elements; None for another class of tuples.
    """
    is_of_torch = kind is torch.Size or hasattr(kind, "n_sequence_fields")
    return kind if is_of_torch else getattr(kind, "_make", None)


def of_function(fn: Any) -> Prepare | None:
    """Return the table row of a function that shows values; a pybind11 function has no hash."""
    if not isinstance(fn, FUNCTIONS):
        return None
    return SHOWS.get(fn) or SHOWS.get(f"{fn.__module__}:{fn.__name__}")


def show(prepare: Prepare, tx: Any, args: Any, kwargs: Any) -> Any:
    """Put a call that shows values (print, logging, sf.debug) into Dynamo's graph."""
    from torch._dynamo.variables import ConstantVariable

    given = [_object(tx, x) for x in args]
    named = {name: _object(tx, x) for name, x in kwargs.items()}
    if prepare is SHOWS[BREAKPOINT]:
        named = {**_locals(tx), **named}
    call = prepare(user_line() or "", given, named)
    if call is not None:
        fn, text, tensors = call
        proxies = [x.proxy for x in tensors]
        tx.output.create_proxy("call_function", fn, (text, *proxies), {})
    return ConstantVariable.create(None)


def _locals(tx: Any) -> dict[str, Any]:
    """Collect the local variables of a frame that are tensors or constants, or contain them."""
    found = {}
    for name, x in tx.symbolic_locals.items():
        is_other = _is_unread(x) and not isinstance(x.original_value(), (torch.Tensor, *SCALARS))
        if name.isidentifier() and not is_other:
            found[name] = _object(tx, x)
    return found


def _is_unread(x: Any) -> bool:
    """Return whether Dynamo has not realized a lazy variable yet."""
    from torch._dynamo.variables import LazyVariableTracker

    return isinstance(x, LazyVariableTracker) and not x.is_realized()


def _object(tx: Any, x: Any, depth: int = 0) -> Any:
    """Convert a Dynamo variable to the object it stands for, with `Traced` for tensors."""
    from torch._dynamo import variables
    from torch._dynamo.variables.misc import StringFormatVariable
    from torch._dynamo.variables.tensor import SymNodeVariable
    from torch._dynamo.variables.user_defined import UserDefinedTupleVariable

    if _is_unread(x) and isinstance(x.original_value(), FUNCTIONS):
        return x.original_value()  # no guard on what it is or closes over
    x = x.realize()
    if isinstance(x, variables.TensorVariable):
        return Traced(x.as_proxy(), is_array=isinstance(x, variables.NumpyNdarrayVariable))
    if isinstance(x, SymNodeVariable):
        proxy = x.as_proxy()
        return _number(proxy.node, proxy.tracer)
    if isinstance(x, StringFormatVariable):
        args = tuple(_object(tx, y, depth + 1) for y in x.sym_args)
        kwargs = {k: _object(tx, y, depth + 1) for k, y in x.sym_kwargs.items()}
        return Delayed(x.format_string, args, kwargs)
    if isinstance(x, UserDefinedTupleVariable) and depth < DEPTH:
        make = maker_of(x.python_type())
        if make is not None:
            return make([_object(tx, y, depth + 1) for y in x.items])
    if isinstance(x, (variables.ListVariable, variables.TupleVariable)) and depth < DEPTH:
        items = [_object(tx, y, depth + 1) for y in x.items]
        is_size = x.python_type() is torch.Size and all(type(y) is int for y in items)
        return items if x.python_type() is list else torch.Size(items) if is_size else tuple(items)
    pairs: Any = getattr(x, "_base_vt", x)  # torch 2.13 holds those of an ordered dict apart
    if isinstance(pairs, variables.ConstDictVariable) and depth < DEPTH:
        is_ordered = x.python_type() is collections.OrderedDict
        if is_ordered or pairs is x:
            every = pairs.items.items()
            shown = [(_object(tx, k.vt, depth + 1), _object(tx, y, depth + 1)) for k, y in every]
            return collections.OrderedDict(shown) if is_ordered else dict(shown)
    if isinstance(x, variables.NestedUserFunctionVariable):
        return _function(tx, x)
    if isinstance(x, variables.GetAttrVariable):
        obj = x.obj
        is_whole = _is_unread(obj)
        owner = obj.original_value() if is_whole else tx.output.resolve_source_value(obj.source)
        return getattr(owner, x.name)
    if x.source is not None and not x.is_python_constant():
        return tx.output.resolve_source_value(x.source)
    if (warning := _warning(tx, x, depth)) is not None:
        return warning
    try:
        return x.as_python_constant()
    except NotImplementedError:
        return f"<{x.python_type_name()}>"


def _warning(tx: Any, x: Any, depth: int) -> DelayedWarning | None:
    """Return a Warning with one argument that the function makes; None for other values."""
    from torch._dynamo import variables
    from torch._dynamo.variables.user_defined import UserDefinedExceptionObjectVariable

    known: Any = variables
    if not isinstance(x, (known.ExceptionVariable, UserDefinedExceptionObjectVariable)):
        return None
    kind = x.python_type()
    args = getattr(x, "_base_vt", x).args
    if not issubclass(kind, Warning) or len(args) != 1:
        return None
    return DelayedWarning(kind, (_object(tx, args[0], depth + 1),))


def _number(node: Any, tracer: Any) -> Traced | Computed:
    """Return the number that `item` read from a tensor, or what is computed from such numbers."""
    if node.op == "call_method" and node.target == "item":
        return Traced(torch.fx.Proxy(node.args[0], tracer), is_number=True)
    if node.op == "call_method" and node.target == "__round__":  # Dynamo removes functions alone
        node.op, node.target = "call_function", round
    name = getattr(node.target, "__name__", str(node.target))
    if name in NUMBERS:
        args = (_number(x, tracer) if isinstance(x, torch.fx.Node) else x for x in node.args)
        return Computed(name, tuple(args))
    raise CaptureError.of(
        "print",
        "the function prints a number that is computed from a tensor's value",
        needed="tensors, or x.item() itself",
        fix="print the tensor itself, or compute with tensors: x / n in place of x.item() / n",
        source=user_line(),
    )


def _function(tx: Any, x: Any) -> Any:
    """Rebuild a function that the captured one defines, over the cells that exist outside."""
    code = x.get_code()
    cells = []
    for cell in x.closure.items if x.closure is not None else ():
        content = tx.output.side_effects.load_cell(cell)
        cells.append(_cell(tx, content))
    names = ", ".join(
        name
        for name, cell in zip(code.co_freevars, cells, strict=True)
        if isinstance(cell.cell_contents, Traced)
    )
    if names:
        raise CaptureError.of(
            "sf.debug.callback",
            f"the function {code.co_name} closes over {names}, which the captured function creates",
            needed="a function that takes these values as arguments",
            fix=f"sf.debug.callback({code.co_name}, {names}), where {code.co_name} has a parameter "
            "for each value",
            source=user_line(),
        )
    made = types.FunctionType(code, x.get_globals(), code.co_name, None, tuple(cells))
    made.__defaults__ = tuple(_object(tx, y) for y in x.defaults.items) if x.defaults else None
    return made


def _cell(tx: Any, content: Any) -> types.CellType:
    """Return the closure cell of a variable: the outer one, if nothing has read it yet."""
    if not _is_unread(content):
        return types.CellType(_object(tx, content))
    cell = tx.output.resolve_source_value(content.source.base)
    return cell if isinstance(cell, types.CellType) else types.CellType(content.original_value())


def method_loaded(load: Callable[..., Any], tx: Any, name: str) -> None:
    """Patch Dynamo's load of a method: of a container, without realizing it, of a text that tensors
    are formatted in, or of the process's output, which print stands for.
    """
    from torch._dynamo.variables import GetAttrVariable
    from torch._dynamo.variables.base import VariableTracker

    x = tx.stack[-1]
    if name in STREAMS:
        value = x.original_value() if _is_unread(x) else _object_of(x)
        if value is not None and (value is sys.stdout or value is sys.stderr):
            tx.stack[-1] = VariableTracker.build(tx, STREAMS[name][value is sys.stderr])
            return
    if _is_unread(x):
        kind = type(x.original_value())
        if kind in CONTAINERS and callable(getattr(kind, name, None)):
            tx.stack[-1] = GetAttrVariable(x, name)
            return
    if name == "join" or name in ALIGNED:
        text = x.realize()
        if _is_text(text):
            tx.stack[-1] = _text_method()(text, name)
            return
    load(tx, name)


@functools.cache
def _text_method() -> Any:
    """Make the Dynamo variable of a method of a text."""
    from torch._dynamo.utils import unpack_iterable
    from torch._dynamo.variables import ListVariable
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.misc import StringFormatVariable

    class TextMethod(VariableTracker):
        """A method that joins texts or pads one, of values that may not be known yet."""

        def __init__(self, text: Any, name: str) -> None:
            super().__init__()
            self.text, self.name = text, name

        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            given = [x.realize() for x in args]
            is_delayed = isinstance(self.text, StringFormatVariable)
            if self.name == "join" and not is_delayed and len(given) == 1:
                items = [x.realize() for x in unpack_iterable(tx, given[0])]
                if any(isinstance(x, StringFormatVariable) for x in items):
                    separator = _escaped(self.text.as_python_constant())
                    return StringFormatVariable(separator.join(["{}"] * len(items)), items, {})
                args = [ListVariable(items)]
            elif is_delayed and len(given) == 1 and given[0].is_python_constant():
                width = f"{ALIGNED[self.name]}{given[0].as_python_constant()}"
                return StringFormatVariable(f"{{:{width}}}", [self.text], {})
            return self.text.call_method(tx, self.name, args, kwargs)

    return TextMethod


def _object_of(x: Any) -> Any:
    """The object that a variable stands for; None for one that Dynamo has another class for."""
    from torch._dynamo.variables import UserDefinedObjectVariable

    x = x.realize()
    return x.value if isinstance(x, UserDefinedObjectVariable) else None


@read_by_dynamo
def _write_out(text: str) -> None:
    """sys.stdout.write."""
    print(text, end="")


@read_by_dynamo
def _write_error(text: str) -> None:
    """sys.stderr.write."""
    print(text, end="", file=sys.stderr)


@read_by_dynamo
def _flush() -> None:
    """sys.stdout.flush: what a program prints is not held back."""


STREAMS = {"write": (_write_out, _write_error), "flush": (_flush, _flush)}


def logger_found(tx: Any, args: Any, kwargs: Any) -> Any:
    """The variable of a logger, which `logging.getLogger` finds by a name."""
    from torch._dynamo.source import GlobalSource
    from torch._dynamo.variables.builder import VariableBuilder

    named = {key: x.as_python_constant() for key, x in kwargs.items()}
    logger = logging.getLogger(*[x.as_python_constant() for x in args], **named)
    name = tx.output.install_global_by_id("logger", logger)
    return VariableBuilder(tx, GlobalSource(name))(logger)


def logger_called(
    call: Callable[..., Any], logger: Any, tx: Any, name: str, args: Any, kwargs: Any
) -> Any:
    """Patch Dynamo's call of a logger's method."""
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.builder import SourcelessBuilder

    if name in QUESTIONS:
        given = [x.as_python_constant() for x in args]
        return ConstantVariable.create(getattr(logger.value, name)(*given))
    if not hasattr(logging.Logger, name):
        return call(logger, tx, name, args, kwargs)
    if name not in LOG_METHODS:
        written = inspect.unwrap(getattr(logging.Logger, name))
        if isinstance(written, types.FunctionType) and written.__module__ != logging.__name__:
            # a library has added it to the class, as transformers its `warning_once`
            return SourcelessBuilder.create(tx, written).call_function(tx, [logger, *args], kwargs)
        raise CaptureError.of(
            f"logging.Logger.{name}",
            f"the function configures the logger {logger.value.name!r}",
            needed="a function without side effects",
            fix=f"call {name} before the function runs",
            source=user_line(),
        )
    about = [ConstantVariable.create(x) for x in (logger.value.name, name)]
    return show(SHOWS[logging.Logger], tx, [*about, *args], kwargs)


def run_called(fn: Any, _: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Replace print and its like in a module that is run and not traced."""
    frame = user_frame()
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""
    if fn is BREAKPOINT and frame is not None:
        kwargs = {**frame.f_locals, **kwargs}
    call = SHOWS[fn](where, [*args], kwargs)
    if call is not None:
        shows, text, tensors = call
        shows(text, *tensors)


def run_logged(
    _: Callable[..., Any], logger: Any, level: int, msg: Any, args: Any, *others: Any, **kwargs: Any
) -> None:
    """Replace `Logger._log` in a module that is run and not traced. torch logs errors that it
    raises as well, which are not shown twice; its other logs stay its own.
    """
    if logger.name.startswith("torch."):
        if level < logging.ERROR:
            _(logger, level, msg, args, *others, **kwargs)
        return
    run_called(logging.Logger, _, logger.name, "log", level, msg, *args)


def builtin_called(call: Callable[..., Any], builtin: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Patch Dynamo's call of a builtin, which may be print, breakpoint, or format tensors."""
    from torch._dynamo.variables.misc import StringFormatVariable

    fn = builtin.fn
    if fn is print or fn is breakpoint:
        return show(SHOWS[fn], tx, args, kwargs)
    if fn in JOINS and any(isinstance(x, StringFormatVariable) for x in args):
        formats = [_format_of(x) for x in args]
        if all(row is not None for row in formats):
            texts, values = zip(*formats, strict=True)
            return StringFormatVariable("".join(texts), [y for row in values for y in row], {})
    text = None
    if fn in (str, repr) and len(args) == 1 and _is_computed(args[0]):
        text = TEXTS[fn]
    elif fn is operator.mod and args[0].is_python_constant():
        left = args[0].as_python_constant()
        given = _items(args[1].realize()) if isinstance(left, str) else []
        if any(map(_is_computed, given)):
            text = _as_format(left, given)
            args = given if text is not None else args
    if text is None:
        return call(builtin, tx, args, kwargs)
    return StringFormatVariable(text, [*args], {})


def _is_computed(x: Any) -> bool:
    """Check for a tensor, or a number that `item` reads from one."""
    from torch._dynamo.variables.tensor import SymNodeVariable

    x = x.realize()
    return x.is_tensor() or isinstance(x, SymNodeVariable)


def _format_of(x: Any) -> Any:
    """The text of a str.format and its values; None for one whose fields have names or numbers."""
    from torch._dynamo.variables.misc import StringFormatVariable

    x = x.realize()
    if isinstance(x, StringFormatVariable):
        is_plain = not x.sym_kwargs and not NUMBERED.search(x.format_string.replace("{{", ""))
        return (x.format_string, [*x.sym_args]) if is_plain else None
    if not x.is_python_constant() or not isinstance(x.as_python_constant(), str):
        return None
    return _escaped(x.as_python_constant()), []


def _is_text(x: Any) -> bool:
    """Check for a str, also one of values that are not known yet. Not each variable has a type."""
    from torch._dynamo.variables.misc import StringFormatVariable

    is_constant = x.is_python_constant() and isinstance(x.as_python_constant(), str)
    return is_constant or isinstance(x, StringFormatVariable)


def _escaped(text: str) -> str:
    """Write a text as a str.format of nothing."""
    return text.replace("{", "{{").replace("}", "}}")


def _items(x: Any) -> list[Any]:
    """List the values that a format text takes."""
    from torch._dynamo.variables import TupleVariable

    return [y.realize() for y in x.items] if isinstance(x, TupleVariable) else [x]


def _as_format(text: str, values: Sequence[Any]) -> str | None:
    """Rewrite "..." % x as a str.format; None where the two differ."""
    plain = _escaped(text)
    fields = [match[1] for match in FIELD.finditer(text) if match[1] != "%"]
    pairs = zip(fields, values, strict=False)
    if "%" in FIELD.sub("", text) or any(f[-1] == "d" and not _is_integer(x) for f, x in pairs):
        return None

    def field(match: re.Match[str]) -> str:
        spec = match[1]
        return "%" if spec == "%" else f"{{!{spec}}}" if spec in "sr" else f"{{:{spec}}}"

    return FIELD.sub(field, plain)


def _is_integer(x: Any) -> bool:
    """Check for a value that "%d" writes as "{:d}" does."""
    if x.is_tensor():
        dtype = x.as_proxy().node.meta["example_value"].dtype
        return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    return x.python_type() is int
