"""The op that shows values of a running program: it prints, logs, warns, calls a function or stops.

It returns nothing, so no pass may take it for unread (`has_effect`). What it does is a text:
`encoded` writes it of the arguments of a call, and `show` reads it where the values are known.
"""

from __future__ import annotations

import builtins
import contextlib
import contextvars
import itertools
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import _compat
from .higher_order import HigherOrder
from .loops import Loop

SCALARS = (str, int, float, bool, type(None))
FIRST = "first"
_objects: dict[int, Any] = {}  # functions that programs call, by number
_numbers = itertools.count()
_rank: contextvars.ContextVar[int | None] = contextvars.ContextVar("rank", default=None)


@torch.library.custom_op("shardfn::debug", mutates_args=())
def debug(xs: list[torch.Tensor], what: str) -> None:
    """Show the values of tensors, as a text says."""
    rank = _rank.get()  # of a simulated one
    if rank is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
    show(what, {rank: xs})


@debug.register_fake
def _(xs: list[torch.Tensor], what: str) -> None:
    return None


@debug.register_vmap
def _(info: Any, in_dims: Any, xs: list[torch.Tensor], what: str) -> tuple[None, None]:
    for i in range(info.batch_size):
        dims = zip(xs, in_dims[0], strict=True)
        debug([x if d is None else x.select(d, i) for x, d in dims], what)
    return None, None


DEBUG = torch.ops.shardfn.debug.default
_compat.keep_effects(DEBUG)


@_compat.keep_in_graph
def call(what: str, *tensors: torch.Tensor) -> None:
    """Show tensors; a call in the graph of a captured function."""
    debug([x.detach() for x in tensors] or [torch.zeros(())], what)


def has_effect(node: torch.fx.Node) -> bool:
    """Whether a node shows values, itself or in a graph that it runs."""
    if isinstance(node.target, (Loop, HigherOrder)):
        every: Any = node.target.graphs
        graphs = (getattr(x, "graph", x) for x in every)
        return any(has_effect(inner) for graph in graphs for inner in graph.nodes)
    return node.target is DEBUG


def erase(graph: torch.fx.Graph) -> None:
    """Show nothing in a graph that computes again what another one shows."""
    for node in reversed(graph.nodes):
        if node.target is DEBUG:
            graph.erase_node(node)


def encoded(kind: str, ranks: str, where: str, args: Any, kwargs: Any) -> tuple[list[Any], str]:
    """The tensors of a call, and the text of what is to be done with them.

    Args:
        kind: a row of `SHOWS`.
        ranks: "first" or "all".
        where: file:line of the call.
        args: the arguments; tensors may be `_compat.Traced`.
        kwargs: those by name.
    """
    tensors: list[Any] = []

    def written(x: Any) -> Any:
        if isinstance(x, (torch.Tensor, _compat.Traced)):
            tensors.append(x)
            return {"item" if getattr(x, "is_number", False) else "tensor": len(tensors) - 1}
        if type(x) in SCALARS:
            return x
        if isinstance(x, _compat.Delayed):
            return {"format": [x.text, written(x.args), written(x.kwargs)]}
        if type(x) is list:
            return [written(y) for y in x]
        if type(x) is tuple:
            return {"tuple": [written(y) for y in x]}
        if type(x) is dict:
            return {"dict": [[written(k), written(y)] for k, y in x.items()]}
        if kind not in OF_OBJECTS and not isinstance(x, type):
            return str(x)
        number = next((n for n, y in _objects.items() if y is x), None)
        number = next(_numbers) if number is None else number
        _objects[number] = x
        return {"object": number}

    return tensors, json.dumps([kind, ranks, where, written(tuple(args)), written(dict(kwargs))])


def _read(x: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """What `written` wrote, with tensors in their places."""
    if isinstance(x, list):
        return [_read(y, tensors) for y in x]
    if not isinstance(x, dict):
        return x
    ((key, value),) = x.items()
    if key == "tensor":
        return tensors[value]
    if key == "item":
        return tensors[value].item()
    if key == "object":
        return _objects[value]
    if key == "tuple":
        return tuple(_read(y, tensors) for y in value)
    if key == "dict":
        return {_read(k, tensors): _read(y, tensors) for k, y in value}
    text, args, kwargs = value
    return text.format(*_read(args, tensors), **_read(kwargs, tensors))


def show(what: str, values: Mapping[int, Sequence[torch.Tensor]]) -> None:
    """Do what a text says.

    Args:
        what: the text.
        values: the tensors of each rank that is here.
    """
    kind, ranks, where, args, kwargs = json.loads(what)
    every = {}
    with _compat.values(), torch.no_grad():
        for rank, xs in values.items():
            own = [x.detach().clone() for x in xs]
            every[rank] = _read(args, own), _read(kwargs, own)
    if kind == "breakpoint":
        _stop(where, [given for _, given in every.values()])
        return
    for rank, (given, named) in every.items():
        if ranks != FIRST or rank == 0:
            SHOWS[kind](rank if ranks != FIRST else None, where, *given, **named)


def _print(rank: int | None, where: str, text: str, *args: Any, **kwargs: Any) -> None:
    """`sf.debug.print`."""
    builtins.print(f"{_of(rank)}{text.format(*args, **kwargs)}", flush=True)


def _plain(rank: int | None, where: str, *args: Any, sep: Any = " ", end: Any = "\n") -> None:
    """The print of Python."""
    builtins.print(*args, sep=sep, end=end, flush=True)


def _log(rank: int | None, where: str, name: str, method: str, *args: Any, **kwargs: Any) -> None:
    """A method of a logger."""
    getattr(logging.getLogger(name), method)(*args, **kwargs)


def _warn(rank: int | None, where: str, message: Any, category: Any = UserWarning) -> None:
    """`warnings.warn`."""
    file, _, line = where.rpartition(":")
    warnings.warn_explicit(message, category, file, int(line or 0))


def _call(rank: int | None, where: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """`sf.debug.callback`."""
    fn(*args, **kwargs)


SHOWS: dict[str, Callable[..., None]] = {
    "print": _print,
    "plain": _plain,
    "log": _log,
    "warn": _warn,
    "callback": _call,
}
OF_OBJECTS = ("callback", "breakpoint")


def _of(rank: int | None) -> str:
    return "" if rank is None else f"rank {rank}: "


def _stop(where: str, ranks: list[dict[str, Any]]) -> None:
    """Start the debugger at a line of the user's, with the values of all ranks that are here.
    The names are those of the first one.
    """
    file, _, line = where.rpartition(":")
    text = "\n" * (int(line or 1) - 1) + "breakpoint(); ranks"
    exec(compile(text, file or "<sf.debug.breakpoint>", "exec"), {"ranks": ranks, **ranks[0]})


@contextlib.contextmanager
def on_rank(number: int) -> Iterator[None]:
    """The context of a simulated rank that runs."""
    token = _rank.set(number)
    try:
        yield
    finally:
        _rank.reset(token)


_notes: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("notes", default=None)


@contextlib.contextmanager
def noting(name: str) -> Iterator[None]:
    """The context of a capture. What shows constants alone is done when it ends, once, however
    often the function has been read.

    Args:
        name: of the function.
    """
    token = _notes.set([])
    try:
        yield
    finally:
        notes = _notes.get() or []
        _notes.reset(token)
        for text in dict.fromkeys(notes):
            kind, _, where, args, kwargs = json.loads(text)
            note = f"(when {name} is captured: no tensor is in it)"
            SHOWS[kind](None, where, *_marked(kind, _read(args, ()), note), **_read(kwargs, ()))


def _marked(kind: str, args: tuple[Any, ...], note: str) -> tuple[Any, ...]:
    """The arguments of a call, with a note."""
    if kind == "plain":
        return *args, note
    first = 0 if kind == "warn" else 3 if args[1] == "log" else 2
    return *args[:first], f"{args[first]} {note}", *args[first + 1 :]


@_compat.constant_in_graph
def begin() -> None:
    """Forget the calls of an earlier reading of the function."""
    notes = _notes.get()
    if notes is not None:
        notes.clear()


def note(text: str) -> None:
    """Show constants when the capture ends; at once outside of one."""
    notes = _notes.get()
    if notes is None:
        show(text, {0: ()})
    else:
        notes.append(text)
