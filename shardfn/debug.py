"""`sf.debug`: print values of a running program, pass the values to a function, or stop in a
debugger.

The debug calls run in program order, also in loops, branches, derivatives, vmap and compiled code.
A debug call shows the primal values of the forward, and nothing of a derivative. A debug call shows
the global value of a tensor, or the local value inside `shard_map`. In a captured function,
Python's own `print`, `breakpoint`, `logging` and `warnings.warn` become debug calls.

Example:
    >>> import torch, shardfn as sf
    >>> def mean(x):
    ...     sf.debug.print("the sum is {}", x.sum())
    ...     return x.mean()
    >>> with sf.fake_world(2):
    ...     mesh = sf.make_mesh((2,), ("dp",))
    ...     y = sf.shard(mean, mesh, sf.P("dp"), backend="aten")(torch.ones(4))
    the sum is 4.0
"""

from __future__ import annotations

import builtins
import logging
import pprint
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from . import _compat, _tree
from .errors import CaptureError, ShardError, call_site, user_frame
from .ops import debug

Call = tuple[Callable[..., Any], str, list[Any]] | None
RANKS = "first", "all"


def print(fmt: str, *args: Any, ranks: str = "first", **kwargs: Any) -> None:
    """Print the values of tensors each time the compiled program runs.

    Args:
        fmt: a format text, as for `str.format`. Number formats such as "{:.3f}" also work for
            tensors of one element.
        args: tensors, constants, and trees of both. Tensors are printed with their global values.
        ranks: whether only the "first" rank prints, or "all" ranks print, each with its rank
            number.
        kwargs: values for the named fields of fmt.

    Raises:
        ShardError: fmt is not a str or does not fit the arguments, or ranks is neither "first" nor
            "all".

    Example:
        >>> import torch, shardfn as sf
        >>> def loss(w):
        ...     y = (w * w).sum()
        ...     sf.debug.print("y is {}, of {n} elements", y, n=w.numel())
        ...     return y
        >>> sf.grad(loss)(torch.tensor([1.0, 2.0]))
        y is 5.0, of 2 elements
        tensor([2., 4.])
    """
    _run(_print_call(call_site() or "", [fmt, *args], {"ranks": ranks, **kwargs}))


def callback(fn: Callable[..., Any], *args: Any, ranks: str = "first", **kwargs: Any) -> None:
    """Call a Python function with the values of tensors each time the compiled program runs.

    Args:
        fn: any function, whose result is ignored. A program that calls `sf.debug.callback` cannot
            be saved.
        args: tensors, constants, and trees of both. In fn, the tensors are ordinary tensors with
            global values.
        ranks: whether only the "first" rank calls fn, or "all" ranks call fn.
        kwargs: more values for fn, passed by name.

    Raises:
        ShardError: fn is not a function, or ranks is neither "first" nor "all".

    Example:
        >>> import torch, shardfn as sf
        >>> seen = []
        >>> def step(x):
        ...     sf.debug.callback(seen.append, x.sum())
        ...     return 2 * x
        >>> sf.jit(step, backend="aten")(torch.ones(3))
        tensor([2., 2., 2.])
        >>> seen
        [tensor(3.)]
    """
    _run(_callback_call(call_site() or "", [fn, *args], {"ranks": ranks, **kwargs}))


def breakpoint(**values: Any) -> None:
    """Stop in the debugger when the program runs, at the user's source line, like Python's
    `breakpoint`.

    The debugger shows the local variables of the function at the line of the breakpoint. The
    variable `ranks` holds a dict of local variables for each rank of the process.

    Args:
        values: more values to show in the debugger, by name.

    Raises:
        TypeError: a value is passed as a positional argument.

    Example:
        >>> import torch, shardfn as sf
        >>> def step(x):
        ...     y = 2 * x
        ...     sf.debug.breakpoint()
        ...     return y
        >>> sf.jit(step, backend="aten")(torch.ones(3))  # doctest: +SKIP
        > step.py(3)step()
        (Pdb) p y, ranks[0]["x"]
    """
    frame = user_frame()
    variables = {} if frame is None else frame.f_locals
    _run(_breakpoint_call(call_site() or "", [], {**variables, **values}))


def _run(call: Call) -> None:
    """Run a debug call at once, where Python runs the function itself."""
    if call is not None:
        fn, text, tensors = call
        fn(text, *(x.full_tensor() if hasattr(x, "full_tensor") else x for x in tensors))


def _graph_call(kind: str, where: str, args: list[Any], kwargs: dict[str, Any]) -> Call:
    """Build the call that the graph holds: the function, the text and the tensors."""
    ranks = kwargs.pop("ranks", "first")
    if ranks not in RANKS:
        raise ShardError.of(
            f"sf.debug.{kind}, ranks", f"it is {ranks!r}", needed='"first" or "all"', source=where
        )
    tensors, text = debug.encode_call(kind, ranks, where, args, kwargs)
    return debug.call, text, tensors


def _print_call(where: str, args: list[Any], kwargs: dict[str, Any]) -> Call:
    """Check the text and the arguments of `sf.debug.print`, and build its call."""
    if not args or not isinstance(args[0], (str, _compat.Delayed)):
        got, fix = _describe_first(args), 'sf.debug.print("x is {}", x)'
        raise ShardError.of(
            "sf.debug.print, fmt", got, needed="a text", fix=fix, source=where, arg_path="fmt"
        )
    named = {name: _AnyFormat() for name in kwargs}
    try:
        if isinstance(args[0], str):
            args[0].format(*[_AnyFormat() for _ in args[1:]], **named)
    except (IndexError, KeyError, ValueError) as error:
        got = (
            f"the format {args[0]!r} does not fit {len(args) - 1} positional arguments and the "
            f"names {sorted(named)}: {error}"
        )
        fix = "write a field for each value: {} by position, {name} by name"
        raise ShardError.of("sf.debug.print, fmt", got, fix=fix, source=where) from None
    return _graph_call("print", where, args, kwargs)


class _AnyFormat:
    """A stand-in for any value, with which the fields of a format text are checked."""

    def __getattr__(self, name: str) -> _AnyFormat:
        return self

    def __getitem__(self, key: Any) -> _AnyFormat:
        return self

    def __format__(self, spec: str) -> str:
        return ""


def _describe_first(args: list[Any]) -> str:
    """Describe the first argument in an error."""
    if not args:
        return "there is none"
    is_tensor = isinstance(args[0], (torch.Tensor, _compat.Traced))
    return f"it is {'a tensor' if is_tensor else type(args[0]).__name__}"


def _callback_call(where: str, args: list[Any], kwargs: dict[str, Any]) -> Call:
    """Check the function of `sf.debug.callback`, and build its call."""
    if not args or not callable(args[0]):
        got, fix = _describe_first(args), "sf.debug.callback(fn, x)"
        raise ShardError.of(
            "sf.debug.callback, fn", got, needed="a function", fix=fix, source=where, arg_path="fn"
        )
    return _graph_call("callback", where, args, kwargs)


def _call_of(module: str, name: str) -> Callable[..., Call]:
    """Build calls of a function of a library that prints its arguments."""

    def prepare(where: str, args: list[Any], kwargs: dict[str, Any]) -> Call:
        return _callback_call(where, [getattr(sys.modules[module], name), *args], kwargs)

    return prepare


def _breakpoint_call(where: str, args: list[Any], kwargs: dict[str, Any]) -> Call:
    """Build the call of a breakpoint, with the variables that can be shown."""
    shown = {name: x for name, x in kwargs.items() if name != "ranks" and _is_showable(x)}
    return _graph_call("breakpoint", where, [], shown)


def _is_showable(x: Any) -> bool:
    """Return whether a value is a tree of tensors and constants."""
    kinds = torch.Tensor, _compat.Traced, *debug.SCALARS
    return all(isinstance(leaf, kinds) for leaf in _tree.leaves(x))


def _python_print_call(where: str, args: list[Any], kwargs: dict[str, Any]) -> Call:
    """Build the call of Python's own `print`; refuse another file than stdout and stderr."""
    file = kwargs.pop("file", None)
    kwargs.pop("flush", None)
    if file not in (None, sys.stdout, sys.stderr):
        raise CaptureError.of(
            "print",
            "print is called with file=",
            needed="print to the standard output",
            fix="sf.debug.callback(write, x), where write(x) writes to the file",
            source=where,
        )
    if file is not None and file is not sys.stdout:
        kwargs["is_error"] = True
    return _call_or_defer("plain", where, args, kwargs)


def _log_call(where: str, args: list[Any], kwargs: dict[str, Any]) -> Call:
    """Build the call of a logger's method."""
    kwargs.pop("stacklevel", None)
    return _call_or_defer("log", where, args, kwargs)


def _warning_call(where: str, args: list[Any], kwargs: dict[str, Any]) -> Call:
    """Build the call of `warnings.warn`."""
    arguments = dict(zip(("message", "category"), args, strict=False)) | kwargs
    message = arguments["message"]
    category = getattr(message, "kind", arguments.get("category") or UserWarning)
    return _call_or_defer("warn", where, [message, category], {})


def _call_or_defer(kind: str, where: str, args: list[Any], kwargs: dict[str, Any]) -> Call:
    """Build a call of Python's own functions. One of constants alone runs when the capture ends."""
    call = _graph_call(kind, where, args, kwargs)
    if call is not None and not call[2]:
        debug.show_constants(call[1])
        return None
    return call


def _root_logger(method: str) -> Callable[..., Call]:
    """Build calls of a function of `logging`, which uses the root logger."""
    return lambda where, args, kwargs: _log_call(where, ["root", method, *args], kwargs)


_compat.SHOWS.update(
    {
        print: _print_call,
        callback: _callback_call,
        breakpoint: _breakpoint_call,
        builtins.print: _python_print_call,
        builtins.breakpoint: _breakpoint_call,
        warnings.warn: _warning_call,
        pprint.pprint: _call_of("pprint", "pprint"),
        pprint.pp: _call_of("pprint", "pp"),
        "rich:print": _call_of("rich", "print"),
        logging.Logger: _log_call,
        **{
            getattr(logging, name): _root_logger(name)
            for name in _compat.LOG_METHODS
            if hasattr(logging, name)
        },
    }
)
