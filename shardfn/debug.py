"""Values of a running program: print them, call a function of them, or stop at them.

The calls stay in the program, in order, in loops and branches, under derivatives and vmap, and in
compiled code. They show the primal values of the forward; a derivative shows nothing more. A
tensor is shown with its global value, in `shard_map` with that of the rank. Python's own `print`,
`breakpoint`, `logging` and `warnings.warn` inside of a captured function are read as these.
"""

from __future__ import annotations

import builtins
import logging
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
LEVELS = ("debug", "info", "warning", "error", "critical", "exception", "log", "warn", "fatal")


def print(fmt: str, *args: Any, ranks: str = "first", **kwargs: Any) -> None:
    """Print values each time the program runs.

    Args:
        fmt: the text, as of `str.format`: "{}" for an argument, "{name}" for one by name. A
            tensor of one element takes the format of a number: "{:.3f}".
        args: tensors, which are printed with their global values, constants, and trees of both.
        ranks: "first" prints on rank 0; "all" on each rank, with its number.
        kwargs: values by name.

    Raises:
        ShardError: fmt is not a text, does not fit the arguments, or ranks is neither.

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
    _run(_prepared_print(call_site() or "", [fmt, *args], {"ranks": ranks, **kwargs}))


def callback(fn: Callable[..., Any], *args: Any, ranks: str = "first", **kwargs: Any) -> None:
    """Call a function with the values of tensors each time the program runs.

    Args:
        fn: any function; its result is dropped. A program that calls it cannot be saved.
        args: tensors, which it gets as plain tensors of global values, constants, and trees of
            both.
        ranks: "first" calls it on rank 0; "all" on each rank.
        kwargs: values by name.

    Raises:
        ShardError: fn is not a function, or ranks is neither.

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
    _run(_prepared_callback(call_site() or "", [fn, *args], {"ranks": ranks, **kwargs}))


def breakpoint(**values: Any) -> None:
    """Stop in the debugger where the program runs, at the user's line, as Python's `breakpoint`.

    The names there are the variables of the function that have a value by then, and `ranks`: for
    each rank that is here, all in a simulated world, a dict of them.

    Args:
        values: more values by name.

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
    own = {} if frame is None else frame.f_locals
    _run(_prepared_stop(call_site() or "", [], {**own, **values}))


def _run(call: Call) -> None:
    """Show values where Python runs the function itself."""
    if call is not None:
        fn, text, tensors = call
        fn(text, *(x.full_tensor() if hasattr(x, "full_tensor") else x for x in tensors))


def _encoded(kind: str, where: str, args: list[Any], kwargs: dict[str, Any]) -> Call:
    """The call of the graph."""
    ranks = kwargs.pop("ranks", "first")
    if ranks not in RANKS:
        raise ShardError.of(
            f"sf.debug.{kind}, ranks", f"it is {ranks!r}", needed='"first" or "all"', source=where
        )
    tensors, text = debug.encode_call(kind, ranks, where, args, kwargs)
    return debug.call, text, tensors


def _prepared_print(where: str, args: list[Any], kwargs: dict[str, Any]) -> Call:
    if not args or not isinstance(args[0], (str, _compat.Delayed)):
        got, fix = _got(args), 'sf.debug.print("x is {}", x)'
        raise ShardError.of(
            "sf.debug.print, fmt", got, needed="a text", fix=fix, source=where, arg_path="fmt"
        )
    named = {name: _Anything() for name in kwargs}
    try:
        if isinstance(args[0], str):
            args[0].format(*[_Anything() for _ in args[1:]], **named)
    except (IndexError, KeyError, ValueError) as error:
        got = f"{args[0]!r} does not fit {len(args) - 1} arguments and {sorted(named)}: {error}"
        fix = "a field for each: {} by position, {name} by name"
        raise ShardError.of("sf.debug.print, fmt", got, fix=fix, source=where) from None
    return _encoded("print", where, args, kwargs)


class _Anything:
    """A value of any kind, for a text whose fields are checked."""

    def __getattr__(self, name: str) -> _Anything:
        return self

    def __getitem__(self, key: Any) -> _Anything:
        return self

    def __format__(self, spec: str) -> str:
        return ""


def _got(args: list[Any]) -> str:
    """What the first argument is."""
    if not args:
        return "there is none"
    is_tensor = isinstance(args[0], (torch.Tensor, _compat.Traced))
    return f"it is {'a tensor' if is_tensor else type(args[0]).__name__}"


def _prepared_callback(where: str, args: list[Any], kwargs: dict[str, Any]) -> Call:
    if not args or not callable(args[0]):
        got, fix = _got(args), "sf.debug.callback(fn, x)"
        raise ShardError.of(
            "sf.debug.callback, fn", got, needed="a function", fix=fix, source=where, arg_path="fn"
        )
    return _encoded("callback", where, args, kwargs)


def _prepared_stop(where: str, args: list[Any], kwargs: dict[str, Any]) -> Call:
    shown = {name: x for name, x in kwargs.items() if name != "ranks" and _is_shown(x)}
    return _encoded("breakpoint", where, [], shown)


def _is_shown(x: Any) -> bool:
    kinds = torch.Tensor, _compat.Traced, *debug.SCALARS
    return all(isinstance(leaf, kinds) for leaf in _tree.leaves(x))


def _prepared_plain(where: str, args: list[Any], kwargs: dict[str, Any]) -> Call:
    file = kwargs.pop("file", None)
    kwargs.pop("flush", None)
    if file not in (None, sys.stdout, sys.stderr):
        raise CaptureError.of(
            "print",
            "it prints to a file",
            needed="the standard output",
            fix="sf.debug.callback(write, x), with a function that writes",
            source=where,
        )
    return _python("plain", where, args, kwargs)


def _prepared_log(where: str, args: list[Any], kwargs: dict[str, Any]) -> Call:
    kwargs.pop("stacklevel", None)
    return _python("log", where, args, kwargs)


def _prepared_warning(where: str, args: list[Any], kwargs: dict[str, Any]) -> Call:
    given = dict(zip(("message", "category"), args, strict=False)) | kwargs
    category = given.get("category") or UserWarning
    return _python("warn", where, [given["message"], category], {})


def _python(kind: str, where: str, args: list[Any], kwargs: dict[str, Any]) -> Call:
    """A call of Python's own: of constants alone it is done when the function is captured."""
    call = _encoded(kind, where, args, kwargs)
    if call is not None and not call[2]:
        debug.show_constants(call[1])
        return None
    return call


def _logging(method: str) -> Callable[..., Call]:
    """A function of `logging`, of the root logger."""
    return lambda where, args, kwargs: _prepared_log(where, ["root", method, *args], kwargs)


_compat.SHOWS.update(
    {
        print: _prepared_print,
        callback: _prepared_callback,
        breakpoint: _prepared_stop,
        builtins.print: _prepared_plain,
        builtins.breakpoint: _prepared_stop,
        warnings.warn: _prepared_warning,
        logging.Logger: _prepared_log,
        **{getattr(logging, name): _logging(name) for name in LEVELS if hasattr(logging, name)},
    }
)
