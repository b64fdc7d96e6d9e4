"""Programs as text: short by default, complete on demand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch

from ..buckets import human_bytes
from ..ops.loops import Loop, Scan, While, loop_of
from ..ops.nodes import origin_of, returned_by
from ..ops.pipeline import Pipeline
from ..source_text import Origin, located_in_program
from ..types import REDUCTIONS, MeshPlacements, Program, stage_of
from .printed_names import Names, dotted_names, is_name_of_path, op_name, printed_names

DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "bool", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip
# Of a graph with more lines than this, only collectives and prims are shown.
LONG = 60
# The notation of placements, with its meaning.
LEGEND = {
    r"\d@": "n@axis: a dim of global size n, sharded over the mesh axis",
    r"\d@\w+:\d": "@axis:n: each shard's size is a multiple of n",
    r"\d@[\w:]+\+\d": "@axis+before+after: a shard with a halo of that many rows on each side",
    r"\d@[\w:]+\*\d": "@axis*n: each rank holds a shard of each of n equal blocks (strided)",
    r"\*zigzag": "@axis*zigzag: rank r of n holds chunks r and 2n - 1 - r of 2n",
    r"\bsum@": "sum@axis: a Partial sum over the mesh axis",
    r"\bmax@": "max@axis: a Partial max over the mesh axis",
    r"\bmin@": "min@axis: a Partial min over the mesh axis",
    r"\bavg@": "avg@axis: a Partial mean over the mesh axis",
    r"; [^\]]*\w=\d[^\]]*\]": "axis=n: the value is only on pipeline stage n of the mesh axis",
}


def tensor_type(
    shape: Iterable[int],
    dtype: torch.dtype,
    marks: MeshPlacements = (),
    names: tuple[str, ...] = (),
) -> str:
    """`f32[8@dp, 64; sum@tp pp=1]`: global sizes with the axes that shard them. After a semicolon,
    the axes over which it is Partial, and its stage on an axis.
    """
    sizes = [str(n) for n in shape]
    for name, mark in zip(names, marks, strict=True):
        if not isinstance(mark, str):
            dim, unit, *rest = mark if isinstance(mark, tuple) else (mark, 1)
            sizes[dim] += f"@{name}" + (f":{unit}" if unit > 1 else "") + _inner(rest)
    reductions = [
        f"{mark}@{name}" for name, mark in zip(names, marks, strict=True) if mark in REDUCTIONS
    ]
    stages = [
        f"{name}={mark[1:]}"
        for name, mark in zip(names, marks, strict=True)
        if isinstance(mark, str) and stage_of(mark) is not None
    ]
    others = f"; {' '.join([*reductions, *stages])}" if reductions or stages else ""
    return f"{DTYPES.get(dtype, str(dtype))}[{', '.join(sizes)}{others}]"


def _inner(rest: Sequence[int]) -> str:
    """The blocks of a strided shard, `*3`, those of a zigzag, `*3*zigzag`, or a halo, `+1+1`."""
    if len(rest) != 1:
        return "".join(f"+{number}" for number in rest)
    (blocks,) = rest
    if blocks > 0:
        return f"*{blocks}"
    return f"*{-blocks // 2}*zigzag" if blocks < -2 else "*zigzag"


@attrs.frozen
class Printer:
    """Prints the nodes of one program.

    Args:
        names: the names of the nodes, including those inside loops.
        type_of: the printed type of a node.
        notable: whether a node is shown where a long graph is shortened.
        full: whether to print all lines.
    """

    names: Names
    type_of: Callable[[torch.fx.Node], str]
    notable: Callable[[torch.fx.Node], bool]
    full: bool

    def body(self, graph: torch.fx.Graph) -> list[str]:
        """The lines of the nodes of a graph; of a long graph only the notable ones. A long graph
        shows only the notable ones, with the number of lines left out.
        """
        nodes = [n for n in graph.nodes if n.op == "call_function"]
        if self.full or len(nodes) <= LONG:
            return [line for n in nodes for line in self.lines(n)]
        lines = []
        skipped = 0
        for node in nodes:
            if not self.notable(node):
                skipped += 1
                continue
            lines += _left_out(skipped) + self.lines(node)
            skipped = 0
        return lines + _left_out(skipped)

    def lines(self, node: torch.fx.Node) -> list[str]:
        """`%mm = mm(%x, %w): f32[8, 4] # model.py:12`. A loop is followed by its graphs."""
        record = node.meta.get("collective")
        origin: Origin = record.origin if record else origin_of(node)
        place = located_in_program(**origin)
        where = f"# {place}" if place else ""
        size = human_bytes(record.nbytes) if record else ""
        call = self._collective(node) if record else self._call(node)
        text = f"%{self.names[node]} = {call}: {self.type_of(node)}"
        first = f"  {text:<76} {size:<10} {where}".rstrip()
        if not isinstance(node.target, Loop):
            return [first]
        return [first, *("  " + line for line in self._inside(node))]

    def returned(self, graph: torch.fx.Graph, paths: Sequence[str]) -> list[str]:
        """The return of a program: the value at each path of the result."""
        results = [
            f"{name} = %{self.names[node]}: {self.type_of(node)}{_path_note(name, path)}"
            for name, path, node in zip(dotted_names(paths), paths, returned_by(graph), strict=True)
        ]
        if len(results) <= 1:
            return [" ".join(["  return", *results])]
        lines = [f"    {result}" for result in results]
        return ["  return", *_shortened(lines, "results", self.full)]

    def _inside(self, node: torch.fx.Node) -> list[str]:
        """The lines of a loop's graphs. A short text has only their notable nodes."""
        lines: list[str] = []
        loop = loop_of(node)
        for title, graph in zip(graph_titles(loop), loop.graphs, strict=True):
            if self.full:
                shown = [*self.body(graph), self._end(graph)]
            else:
                notable = [n for n in graph.nodes if self.notable(n)]
                shown = [line for n in notable for line in self.lines(n)]
            if shown:
                lines.append(f"  {title}{self._loop_inputs(loop, graph)}:")
                lines += ["  " + line for line in shown]
        return lines

    def _loop_inputs(self, loop: Loop, graph: torch.fx.Graph) -> str:
        """The inputs of a loop's graph that change from step to step."""
        holders = graph.find_nodes(op="placeholder")[loop.consts :]
        typed = [f"%{self.names[h]}: {self.type_of(h)}" for h in holders]
        return f"({', '.join(typed)})" if typed else ""

    def _end(self, graph: torch.fx.Graph) -> str:
        return "  return " + ", ".join(f"%{self.names[n]}" for n in returned_by(graph))

    def _collective(self, node: torch.fx.Node) -> str:
        record = node.meta["collective"]
        op = f"{record.op}, " if record.op else ""
        tensors = ", ".join(self._argument(x) for x in node.args if isinstance(x, torch.fx.Node))
        return f"{record.kind}[{op}{record.axis}]({tensors})"

    def _call(self, node: torch.fx.Node) -> str:
        args = [self._argument(a) for a in node.args] + [
            f"{k}={self._argument(v)}" for k, v in node.kwargs.items()
        ]
        return f"{op_name(node)}({', '.join(args)})"

    def _argument(self, a: Any) -> str:
        if isinstance(a, torch.fx.Node):
            return f"%{self.names[a]}"
        if isinstance(a, (list, tuple)):
            return "[" + ", ".join(self._argument(x) for x in a) + "]"
        return str(a)


def graph_titles(loop: Loop) -> tuple[str, ...]:
    """The title of each graph of a loop."""
    if isinstance(loop, Pipeline):
        return loop.titles
    if isinstance(loop, Scan):
        return (f"{loop.length} steps of body",)
    return ("condition", "body") if isinstance(loop, While) else ("if true", "if false")


def value_type(value: Any) -> str:
    """The type of a node's value, which may be a tuple of tensors."""
    if isinstance(value, torch.Tensor):
        return tensor_type(value.shape, value.dtype)
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(value_type(v) for v in value) + ")"
    return type(value).__name__


def input_lines(
    names: Iterable[str], paths: Iterable[str], types: Iterable[str], full: bool
) -> list[str]:
    """The lines of the inputs; of many, only the first and the last. Of many, only the first and
    the last.
    """
    lines = [
        f"  in    %{name}: {kind}{_path_note(name, path)}"
        for name, path, kind in zip(names, paths, types, strict=True)
    ]
    return _shortened(lines, "inputs", full)


def legend(lines: Iterable[str]) -> list[str]:
    """One line that explains the notation of the placements that occur. Empty if none occur."""
    written = "\n".join(line.split("  # ")[0] for line in lines)
    said = [meaning for mark, meaning in LEGEND.items() if re.search(mark, written)]
    return [f"  legend: {'; '.join(said)}"] if said else []


def program_text(program: Program, full: bool = False) -> str:
    """A Program as text."""
    graph = program.graph.graph
    holders = graph.find_nodes(op="placeholder")
    names = printed_names(graph, dict(zip(holders, dotted_names(program.in_paths), strict=True)))
    printer = Printer(names, _global_type, _is_prim, full)
    count = sum(n.op == "call_function" for n in graph.nodes)
    return "\n".join(
        [
            f"{program.name}: {count} ops over global shapes",
            *input_lines(
                [names[h] for h in holders], program.in_paths, map(_global_type, holders), full
            ),
            *printer.body(graph),
            *printer.returned(graph, program.out_paths),
        ]
    )


def _global_type(node: torch.fx.Node) -> str:
    return value_type(node.meta.get("val"))


def _is_prim(node: torch.fx.Node) -> bool:
    return "shardfn." in str(node.target) or isinstance(node.target, Loop)


def _left_out(count: int) -> list[str]:
    return [f"  ... {count} local ops"] if count else []


def _path_note(name: str, path: str) -> str:
    return "" if is_name_of_path(name, path) else f"   # {path}"


def _shortened(lines: list[str], what: str, full: bool) -> list[str]:
    if full or len(lines) <= 12:
        return lines
    first, middle, last = lines[:6], lines[6:-2], lines[-2:]
    left_out = f"  ...   {len(middle)} more {what}"
    return [*first, left_out, *last]
