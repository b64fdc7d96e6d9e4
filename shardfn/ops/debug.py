"""The op `shardfn::debug` shows values of a running program: it prints, logs, warns, calls a
function or stops.

It returns nothing, so no pass may remove it as unread (`has_effect`). A text says what it does:
`encode_call` writes it from the arguments of a call, and `run_debug_call` carries it out where the
values are known.
"""

from __future__ import annotations

import builtins
import contextlib
import contextvars
import itertools
import json
import logging
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist

from .. import _compat
from .graph_copies import copied
from .higher_order import HigherOrder
from .loops import Loop

SCALARS = (str, int, float, bool, type(None))
FIRST_RANK, ALL_RANKS = "first", "all"
_objects: dict[int, Any] = {}  # functions that programs call, by number
_numbers = itertools.count()
_rank: contextvars.ContextVar[int | None] = contextvars.ContextVar("rank", default=None)


@torch.library.custom_op("shardfn::debug", mutates_args=())
def debug(xs: list[torch.Tensor], what: str) -> None:
    """Show the values of tensors as the text `what` says: the custom op."""
    if _compat.is_tracing():  # a run with other values, which looks for the user's error
        return
    rank = _rank.get()  # of a simulated one
    if rank is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
    run_debug_call(what, {rank: xs})


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
    """Show tensors: the function that Dynamo keeps in the graph of a captured function."""
    debug([x.detach() for x in tensors] or [torch.zeros(())], what)


def has_effect(node: torch.fx.Node) -> bool:
    """Return whether a node shows values, itself or in a graph that it runs."""
    if isinstance(node.target, (Loop, HigherOrder)):
        every: Any = node.target.graphs
        graphs = (getattr(x, "graph", x) for x in every)
        return any(has_effect(inner) for graph in graphs for inner in graph.nodes)
    return node.target is DEBUG


def erase_debug_calls(graph: torch.fx.Graph) -> None:
    """Remove the debug ops from a graph that recomputes another one, so that each value is shown
    once.
    """
    for node in reversed(graph.nodes):
        if node.target is DEBUG:
            graph.erase_node(node)
        else:
            erase_calls_inside(node)


def erase_calls_inside(node: torch.fx.Node) -> None:
    """Remove the debug ops from the loop of a node that recomputes another one."""
    if isinstance(node.target, Loop) and has_effect(node):
        graphs = tuple(map(copied, node.target.graphs))
        for graph in graphs:
            erase_debug_calls(graph)
        node.target = attrs.evolve(node.target, graphs=graphs)


def encode_call(kind: str, ranks: str, where: str, args: Any, kwargs: Any) -> tuple[list[Any], str]:
    """Return the tensors of a debug call, and its kind, line and arguments as JSON text.

    Args:
        kind: a row of `SHOWS`.
        ranks: "first" or "all".
        where: file:line of the call.
        args: the arguments; tensors may be `_compat.Traced`.
        kwargs: those by name.
    """
    tensors: list[Any] = []

    def encode(x: Any) -> Any:
        if isinstance(x, (torch.Tensor, _compat.Traced)):
            tensors.append(x)
            is_number, is_array = (getattr(x, name, False) for name in ("is_number", "is_array"))
            return {"item" if is_number else "array" if is_array else "tensor": len(tensors) - 1}
        if type(x) in SCALARS:
            return x
        if isinstance(x, _compat.Delayed):
            return {"format": [x.text, encode(x.args), encode(x.kwargs)]}
        if isinstance(x, _compat.Computed):
            return {"number": [x.name, encode(x.args)]}
        if type(x) is list:
            return [encode(y) for y in x]
        if type(x) is tuple:
            return {"tuple": [encode(y) for y in x]}
        if isinstance(x, tuple) and _compat.maker_of(type(x)) is not None:
            return {"made": [encode_object(type(x)), [encode(y) for y in x]]}
        if type(x) in (dict, OrderedDict):
            pairs = [[encode(k), encode(y)] for k, y in x.items()]
            return {"dict" if type(x) is dict else "ordered": pairs}
        if kind not in TAKE_OBJECTS and not isinstance(x, type):
            return {"other": [str(x), repr(x)]}
        return encode_object(x)

    def encode_object(x: Any) -> Any:
        number = next((n for n, y in _objects.items() if y is x), None)
        number = next(_numbers) if number is None else number
        _objects[number] = x
        return {"object": number}

    return tensors, json.dumps([kind, ranks, where, encode(tuple(args)), encode(dict(kwargs))])


class OtherObject:
    """The texts of an object that is neither a tensor nor a constant."""

    def __init__(self, text: str, representation: str) -> None:
        self.text, self.representation = text, representation

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.representation

    def __format__(self, spec: str) -> str:
        return format(self.text, spec)


def _decode(x: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Rebuild the arguments that `encode_call` wrote, with the tensors in their places."""
    if isinstance(x, list):
        return [_decode(y, tensors) for y in x]
    if not isinstance(x, dict):
        return x
    ((key, value),) = x.items()
    if key == "tensor":
        return tensors[value]
    if key == "item":
        return tensors[value].item()
    if key == "array":
        return tensors[value].numpy(force=True)
    if key == "made":
        kind, items = _decode(value, tensors)
        make = _compat.maker_of(kind)
        assert make is not None
        return make(items)
    if key == "other":
        return OtherObject(*value)
    if key == "object":
        return _objects[value]
    if key == "tuple":
        return tuple(_decode(y, tensors) for y in value)
    if key == "dict":
        return {_decode(k, tensors): _decode(y, tensors) for k, y in value}
    if key == "ordered":
        return OrderedDict((_decode(k, tensors), _decode(y, tensors)) for k, y in value)
    if key == "number":
        name, args = value
        return _compat.NUMBERS[name](*_decode(args, tensors))
    text, args, kwargs = value
    return text.format(*_decode(args, tensors), **_decode(kwargs, tensors))


def run_debug_call(what: str, values: Mapping[int, Sequence[torch.Tensor]]) -> None:
    """Carry out a debug call: print, log, warn or call with the values, or start the debugger.

    Args:
        what: the text.
        values: the tensors of each rank that is here.
    """
    kind, ranks, where, args, kwargs = json.loads(what)
    decoded = {}
    with _compat.values(), torch.no_grad():
        for rank, xs in values.items():
            local = [x.detach().clone() for x in xs]
            decoded[rank] = _decode(args, local), _decode(kwargs, local)
    if kind == "breakpoint":
        _breakpoint(where, [positional for _, positional in decoded.values()])
        return
    for rank, (positional, named) in decoded.items():
        if ranks == ALL_RANKS:
            SHOWS[kind](rank, where, *positional, **named)
        elif rank == (0 if ranks == FIRST_RANK else ranks):
            SHOWS[kind](None, where, *positional, **named)


def shown_by(what: str, rank: int) -> str:
    """Return the text of a call that one rank shows, for another rank than the first: the first of
    those that run it.
    """
    kind, ranks, *rest = json.loads(what)
    return json.dumps([kind, rank if ranks == FIRST_RANK else ranks, *rest])


def _print(rank: int | None, where: str, text: str, *args: Any, **kwargs: Any) -> None:
    """Print formatted text with the rank in front: `sf.debug.print`."""
    builtins.print(f"{_rank_prefix(rank)}{text.format(*args, **kwargs)}", flush=True)


def _python_print(
    rank: int | None,
    where: str,
    *args: Any,
    sep: Any = " ",
    end: Any = "\n",
    is_error: bool = False,
) -> None:
    """Print as Python's own `print` does, to the output or to the errors of the process."""
    file = sys.stderr if is_error else None
    builtins.print(*args, sep=sep, end=end, file=file, flush=True)


def _log(rank: int | None, where: str, name: str, method: str, *args: Any, **kwargs: Any) -> None:
    """Call a method of a logger."""
    getattr(logging.getLogger(name), method)(*args, **kwargs)


def _warn(rank: int | None, where: str, message: Any, category: Any = UserWarning) -> None:
    """Warn at the user's line: `warnings.warn`."""
    file, _, line = where.rpartition(":")
    warnings.warn_explicit(message, category, file, int(line or 0))


def _call(rank: int | None, where: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Call the user's function: `sf.debug.callback`."""
    fn(*args, **kwargs)


SHOWS: dict[str, Callable[..., None]] = {
    "print": _print,
    "plain": _python_print,
    "log": _log,
    "warn": _warn,
    "callback": _call,
}
TAKE_OBJECTS = ("callback", "breakpoint")


def _rank_prefix(rank: int | None) -> str:
    """Return `rank n: `, or nothing for a line that only the first rank prints."""
    return "" if rank is None else f"rank {rank}: "


def _breakpoint(where: str, ranks: list[dict[str, Any]]) -> None:
    """Start the debugger at the user's line, with the values of all ranks of this process. The
    names are those of the first rank.
    """
    file, _, line = where.rpartition(":")
    text = "\n" * (int(line or 1) - 1) + "breakpoint(); ranks"
    exec(compile(text, file or "<sf.debug.breakpoint>", "exec"), {"ranks": ranks, **ranks[0]})


@contextlib.contextmanager
def as_rank(number: int) -> Iterator[None]:
    """Run a block as a simulated rank, whose number the debug op reads."""
    token = _rank.set(number)
    try:
        yield
    finally:
        _rank.reset(token)


_constant_calls: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar(
    "constant_calls", default=None
)


@contextlib.contextmanager
def show_constants_at_end(name: str) -> Iterator[None]:
    """Run a capture. Debug calls of constants alone run when it ends, once, however often Dynamo
    reads the function.

    Args:
        name: of the function.
    """
    if _constant_calls.get() is not None:  # another one is around it
        yield
        return
    token = _constant_calls.set([])
    try:
        yield
    finally:
        calls = _constant_calls.get() or []
        _constant_calls.reset(token)
        for text in dict.fromkeys(calls):
            kind, _, where, args, kwargs = json.loads(text)
            note = f"(printed when {name} is captured, because no tensor is printed)"
            positional = _with_note(kind, _decode(args, ()), note)
            named = _decode(kwargs, ())
            named |= {"end": "\n"} if named.get("end") == "" else {}
            SHOWS[kind](None, where, *positional, **named)


def _with_note(kind: str, args: tuple[Any, ...], note: str) -> tuple[Any, ...]:
    """Append a note to the text among the arguments of a debug call."""
    if kind == "plain":
        return *(x.rstrip("\n") if isinstance(x, str) else x for x in args), note
    first = 0 if kind == "warn" else 3 if args[1] == "log" else 2
    return *args[:first], f"{args[first]} {note}", *args[first + 1 :]


@_compat.constant_in_graph
def forget_constants() -> None:
    """Forget the debug calls of an earlier reading of the function."""
    calls = _constant_calls.get()
    if calls is not None:
        calls.clear()


def show_constants(text: str) -> None:
    """Run a debug call of constants when the capture ends, or at once outside of one."""
    calls = _constant_calls.get()
    if calls is None:
        run_debug_call(text, {0: ()})
    else:
        calls.append(text)
