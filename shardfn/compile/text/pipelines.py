"""One coordinate's part of a pipeline as JSON and back: its instructions, its results, and the
values that they name.

A value is a list of its kind and its numbers, as `ops.messages.Ref` is a tuple of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...ops.messages import Message, Receive, Ref, Send
from ...ops.pipeline import Add, Free, Instruction, Pipeline, Run, Zero
from ...pipelines.actions import KINDS
from ...types import Aval
from .values import index, torch_value

# the kinds of values, and how many numbers each has
NUMBERS = {"in": 1, "row": 2, "value": 2, "sum": 1, "term": 2, "got": 1, "stack": 1}
TEXTS = ("about", "source_line", "action", "module")  # fields of a message for people
MOST = 2**31


def fields_text(pipeline: Pipeline) -> dict[str, Any]:
    """Write the fields of a pipeline, without its graphs."""
    return {
        "length": pipeline.length,
        "coordinates": pipeline.coordinates,
        "instructions": [WRITERS[type(x)](x) for x in pipeline.instructions],
        "results": [_ref_text(x) for x in pipeline.results],
    }


def fields_of(text: Any) -> dict[str, Any]:
    """Read the fields of a pipeline from JSON. Process groups have no text, and are empty.

    Raises:
        ValueError, TypeError, KeyError: it stands for none.
    """
    return {
        "consts": 0,
        "length": _number(text["length"]),
        "coordinates": _number(text["coordinates"]),
        "instructions": tuple(READERS[name](*rest) for name, *rest in text["instructions"]),
        "results": tuple(map(_ref_of, text["results"])),
    }


def _number(x: Any) -> int:
    return index(x, MOST)


def _ref_text(ref: Ref) -> list[Any]:
    return [list(x) if isinstance(x, tuple) else x for x in ref]


def _ref_of(text: Any) -> Ref:
    kind, *numbers = text
    if len(numbers) != NUMBERS[kind]:
        raise ValueError(f"{text!r} must be a value of a pipeline")
    return (kind, *(tuple(map(_number, x)) if isinstance(x, list) else _number(x) for x in numbers))


def _aval_text(x: Aval) -> list[Any]:
    return [list(x.shape), list(x.stride), str(x.dtype).removeprefix("torch."), x.device]


def _aval_of(text: Any) -> Aval:
    shape, stride, dtype, device = text
    if len(shape) != len(stride) or not isinstance(device, str):
        raise ValueError(f"{text!r} must be a tensor")
    sizes = tuple(map(_number, shape)), tuple(map(_number, stride))
    return Aval(*sizes, torch_value("dtype", dtype), device)


def _message_text(x: Send | Receive) -> list[Any]:
    message = x.message
    ends = [message.source, message.target, message.number]
    texts = [getattr(message, name) for name in TEXTS]
    name = "send" if isinstance(x, Send) else "receive"
    return [name, x.axis, ends, _ref_text(message.value), _aval_text(message.aval), texts]


def _message_of(
    kind: type[Send | Receive], axis: Any, ends: Any, value: Any, aval: Any, texts: Any
) -> Send | Receive:
    said = dict(zip(TEXTS, texts, strict=True))
    if not all(x is None or isinstance(x, str) for x in (axis, *texts)):
        raise ValueError(f"{texts!r} must be the texts of a message")
    source, target, number = map(_number, ends)
    message = Message(source, target, number, _ref_of(value), _aval_of(aval), **said)
    return kind(message, axis, "")


def _run_text(x: Run) -> list[Any]:
    refs = [list(map(_ref_text, x.reads)), list(map(_ref_text, x.makes))]
    return ["run", x.graph, x.kind, x.stage, x.microbatch, *refs]


def _run_of(graph: Any, kind: Any, stage: Any, microbatch: Any, reads: Any, makes: Any) -> Run:
    if kind not in KINDS:
        raise ValueError(f"{kind!r} must be an action")
    refs = tuple(map(_ref_of, reads)), tuple(map(_ref_of, makes))
    return Run(_number(graph), kind, _number(stage), _number(microbatch), *refs)


WRITERS: dict[type[Any], Callable[[Any], list[Any]]] = {
    Run: _run_text,
    Send: _message_text,
    Receive: _message_text,
    Zero: lambda x: ["zero", _ref_text(x.total), _aval_text(x.aval)],
    Add: lambda x: ["add", _ref_text(x.total), _ref_text(x.term)],
    Free: lambda x: ["free", list(map(_ref_text, x.values))],
}
READERS: dict[str, Callable[..., Instruction]] = {
    "run": _run_of,
    "send": lambda *row: _message_of(Send, *row),
    "receive": lambda *row: _message_of(Receive, *row),
    "zero": lambda total, aval: Zero(_ref_of(total), _aval_of(aval)),
    "add": lambda total, term: Add(_ref_of(total), _ref_of(term)),
    "free": lambda values: Free(tuple(map(_ref_of, values))),
}
