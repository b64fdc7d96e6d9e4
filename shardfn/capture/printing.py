"""Programs as text: short by default, whole on demand."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..types import REDUCTIONS, Marks, Program

DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "bool", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip
LONG = (
    60  # a body of more lines than this is shown by its collectives and prims alone
)


def tensor_type(
    shape: Iterable[int],
    dtype: torch.dtype,
    marks: Marks = (),
    names: tuple[str, ...] = (),
) -> str:
    """`f32[8@dp, 64]`: global sizes with the axes that shard them; pending reductions follow a
    semicolon.
    """
    sizes = [str(n) for n in shape]
    for name, mark in zip(names, marks, strict=True):
        if not isinstance(mark, str):
            dim, unit, *halo = mark if isinstance(mark, tuple) else (mark, 1)
            sizes[dim] += (
                f"@{name}"
                + (f":{unit}" if unit > 1 else "")
                + "".join(f"+{rows}" for rows in halo)
            )
    pending = [
        f"{mark}@{name}"
        for name, mark in zip(names, marks, strict=True)
        if mark in REDUCTIONS
    ]
    partial = f"; {' '.join(pending)}" if pending else ""
    return f"{DTYPES.get(dtype, str(dtype))}[{', '.join(sizes)}{partial}]"


def node_line(
    node: torch.fx.Node, type_of: Callable[[torch.fx.Node], str], note: str = ""
) -> str:
    """`%mm = mm(%x, %w): f32[8, 4]   # model.py:12`."""
    source = node.meta.get("source")
    where = f"# {os.path.basename(source)}" if source else ""
    text = f"%{node.name} = {_call(node)}: {type_of(node)}"
    return f"  {text:<76} {note:<10} {where}".rstrip()


def _call(node: torch.fx.Node) -> str:
    name = getattr(node.target, "_opname", None) or getattr(
        node.target, "__name__", str(node.target)
    )
    args = [_argument(a) for a in node.args] + [
        f"{k}={_argument(v)}" for k, v in node.kwargs.items()
    ]
    return f"{name}({', '.join(args)})"


def _argument(a: Any) -> str:
    if isinstance(a, torch.fx.Node):
        return f"%{a.name}"
    if isinstance(a, (list, tuple)):
        return "[" + ", ".join(_argument(x) for x in a) + "]"
    return str(a)


def value_type(value: Any) -> str:
    """The type of a node's value, a tuple of tensors included."""
    if isinstance(value, torch.Tensor):
        return tensor_type(value.shape, value.dtype)
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(value_type(v) for v in value) + ")"
    return type(value).__name__


def body(
    graph: torch.fx.Graph,
    line: Callable[[torch.fx.Node], str],
    notable: Callable[[torch.fx.Node], bool],
    full: bool,
) -> list[str]:
    """The nodes of a graph, a line each; of a long one only the notable, and how many lie
    between.
    """
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    if full or len(nodes) <= LONG:
        return [line(n) for n in nodes]
    out, skipped = [], 0
    for node in nodes:
        if notable(node):
            out += ([f"  ... {skipped} local ops"] if skipped else []) + [
                line(node)
            ]
            skipped = 0
        else:
            skipped += 1
    return out + ([f"  ... {skipped} local ops"] if skipped else [])


def inputs(names: Iterable[str], types: Iterable[str], full: bool) -> list[str]:
    """The inputs, a line each; of many only the first and the last."""
    lines = [
        f"  in   {path}: {kind}" for path, kind in zip(names, types, strict=True)
    ]
    return (
        lines
        if full or len(lines) <= 12
        else [*lines[:6], f"  ...  {len(lines) - 8} more inputs", *lines[-2:]]
    )


def outputs(paths: Iterable[str], types: Iterable[str], full: bool) -> list[str]:
    """The results, a line each; of many only the first and the last."""
    lines = [
        f"  out  {path}: {kind}" for path, kind in zip(paths, types, strict=True)
    ]
    return (
        lines
        if full or len(lines) <= 12
        else [*lines[:6], f"  ...  {len(lines) - 8} more results", *lines[-2:]]
    )


def program_text(program: Program, full: bool = False) -> str:
    """A Program as text."""
    graph = program.graph.graph
    holders, (output,) = (
        graph.find_nodes(op="placeholder"),
        graph.find_nodes(op="output"),
    )
    count = sum(n.op == "call_function" for n in graph.nodes)
    type_of = lambda node: value_type(node.meta.get("val"))
    is_prim = lambda node: "shardfn." in str(node.target)
    lines = [f"{program.name}: {count} ops over global shapes"]
    lines += inputs(program.in_paths, map(type_of, holders), full)
    lines += body(graph, lambda n: node_line(n, type_of), is_prim, full)
    lines += outputs(program.out_paths, map(type_of, output.args[0]), full)
    return "\n".join(lines)
