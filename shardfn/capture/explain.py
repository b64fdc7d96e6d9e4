"""Why a function could not be captured, in the user's words: what torch said becomes where, what and what to try."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import _compat
from ..errors import CaptureError, problem
from . import sources

# What torch says -> what it means for the user, and what to try.
CAUSES = (
    ("side effects happened", "it changes something outside of itself: {places}", "return the new value instead of storing it"),
    ("Data-dependent branching", "it branches on a tensor's value", "torch.where(condition, a, b)"),
    ("operator `print`", "it prints", "return the value and print it outside"),
    ("to return a scalar", "the function to differentiate does not return a scalar", "return loss.sum() or loss.mean()"),
    ("Expected FakeTensor", "it uses torch.cond or another higher-order op under a gradient", "torch.where, or a Python loop"),
    ("floating point dtype can require", "it differentiates an argument that is not floating", "argnums of floating arguments"),
)
SHAPE = ("the shape of {op}'s result depends on values", "a result of fixed size: torch.where, topk, or a mask")
VALUE = ("it reads a tensor's value while it is traced", "keep the value a tensor: no .item(), bool() or int()")


def explained(error: BaseException, fn: Callable[..., Any], name: str, paths: Sequence[str]) -> CaptureError:
    """The CaptureError for what Dynamo or make_fx raised."""
    said, source = str(error), _line(error) or _definition(fn)
    got, fix = _cause(error, said, paths)
    text = problem(name, got, needed="one pure graph of tensor ops", fix=fix, source=source)
    return CaptureError(text, source=source, fix=fix)


def _cause(error: BaseException, said: str, paths: Sequence[str]) -> tuple[str, str]:
    if isinstance(error, _compat.DYNAMIC_SHAPE):
        return SHAPE[0].format(op=said.split("\n", maxsplit=1)[0]), SHAPE[1]
    if isinstance(error, _compat.DATA_DEPENDENT):
        return VALUE
    for sign, got, fix in CAUSES:
        if sign in said:
            return got.format(places=_places(said, paths)), fix
    raised = re.search(r"(?:got|raised exception) (\w+)\((?:\[ConstantVariable\(str: )?['\"](.*?)['\"]\)", said)
    if raised:
        return f"it raises {raised[1]}: {raised[2]}", "a call that works on plain tensors"
    first, *rest = [line.strip() for line in said.splitlines() if line.strip()] or [type(error).__name__]
    why = next((line.removeprefix("Explanation: ") for line in rest if line.startswith("Explanation")), "")
    return f"it cannot be read as one graph: {first}. {why}".rstrip(), "a pure function of tensors"


def _places(said: str, paths: Sequence[str]) -> str:
    """Dynamo's names for what was changed, as the user's."""
    found = re.findall(r"([LG]\[['\"](\w+)['\"]\](?:\[(\d+)\])?(?:\.(\w+))?)", said)
    roots = list(dict.fromkeys(re.split(r"[\[.]", p)[0] for p in paths))
    places = []
    for whole, name, position, attribute in found:
        if name == "args" and position:
            places.append(f"argument {roots[int(position)]}" if int(position) < len(roots) else f"argument {position}")
        else:
            places.append(attribute or (name if not name.startswith("__import") else whole))
    return ", ".join(dict.fromkeys(places)) or "something that it closes over"


def _line(error: BaseException) -> str | None:
    """The innermost line of user code that an error knows of."""
    frames = [(f.filename, f.lineno) for f in getattr(error, "real_stack", None) or ()]
    frames += [(file, int(line)) for file, line in re.findall(r'File "([^"]+)", line (\d+)', str(error))]
    if not frames:
        frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    mine = [f"{file}:{line}" for file, line in frames if not sources.is_ours(file)]
    return mine[-1] if mine else None


def _definition(fn: Callable[..., Any]) -> str | None:
    """Where a function is defined, for errors that know no line."""
    code = getattr(getattr(fn, "func", fn), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else None


def written_input(node: torch.fx.Node) -> torch.fx.Node | None:
    """The input whose memory an in-place op writes to, through views; None if it is a value of the function's own."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], torch.fx.Node):
        alias = getattr(node.target, "is_view", False) or _mutates(node) or "getitem" in str(node.target)
        if not alias:
            return None
        node = node.args[0]
    return node if node.op == "placeholder" else None


def _mutates(node: torch.fx.Node) -> bool:
    return isinstance(node.target, _compat.OpOverload) and node.target._schema.is_mutable


def refuse_mutation(graph: torch.fx.GraphModule, name: str, paths: Sequence[str]) -> bool:
    """Whether the graph writes in place at all; an error if it writes to an input.

    Raises:
        CaptureError: naming the argument and the line.
    """
    holders = graph.graph.find_nodes(op="placeholder")
    writes = [n for n in graph.graph.nodes if n.op == "call_function" and _mutates(n)]
    for node in writes:
        hit = written_input(node)
        if hit is None:
            continue
        position = holders.index(hit)
        path = paths[position] if position < len(paths) else "a tensor that it closes over"
        source, fix = sources.line_of(node.meta.get("stack_trace")), f"return the new value, or write to a copy: {path}.clone()"
        where = f"{name}, argument {path}" if position < len(paths) else f"{name}, {path}"
        text = problem(where, "the function writes to it in place", needed="a function that only returns", fix=fix, source=source)
        raise CaptureError(text, arg_path=path, source=source, fix=fix)
    return bool(writes)
