"""Local programs as text: global sizes with the axes that cut them, collectives with their
bytes.
"""

from __future__ import annotations

import collections

import torch

from ..buckets import human_bytes
from ..capture.printing import (
    body,
    inputs,
    node_line,
    outputs,
    tensor_type,
    value_type,
)
from ..ops.loops import Loop, inner_nodes
from ..types import LocalProgram

WAIT = torch.ops._c10d_functional.wait_tensor.default


def local_text(program: LocalProgram, full: bool = False) -> str:
    """A LocalProgram as text; the short form of a long one shows its collectives."""
    graph, names = program.graph, program.axes.names
    count = sum(n.op == "call_function" for n in graph.nodes)
    lines = [
        f"{program.name} on mesh {program.axes}: {count} ops of one rank; {summary(graph)}"
    ]
    if program.elided:
        lines.append(
            f"  {len(program.elided)} collectives over axes of size 1 were taken out"
        )
    holders = graph.find_nodes(op="placeholder")[len(names) :]
    types = [_placed_type(n, n.meta["type"], names) for n in holders]
    (output,) = graph.find_nodes(op="output")
    lines += inputs(program.in_paths, types, full)
    lines += body(graph, lambda n: _line(n, names), _is_notable, full)
    results = zip(output.args[0], program.out_marks, strict=True)
    lines += outputs(
        program.out_paths,
        [_result_type(n, marks, names) for n, marks in results],
        full,
    )
    return "\n".join(lines)


def summary(graph: torch.fx.Graph) -> str:
    """How many collectives of each kind, and their bytes."""
    count, size = collections.Counter(), collections.Counter()
    for node in inner_nodes(graph):
        if record := node.meta.get("collective"):
            count[record.kind, record.axis] += 1
            size[record.kind, record.axis] += record.nbytes
    said = [
        f"{count[k]} {k[0]} over {k[1]}, {human_bytes(size[k])}"
        for k in sorted(count)
    ]
    return "; ".join(said) or "no communication"


def _is_notable(node: torch.fx.Node) -> bool:
    return "collective" in node.meta or isinstance(node.target, Loop)


def _line(node: torch.fx.Node, names: tuple[str, ...]) -> str:
    record = node.meta.get("collective")
    if isinstance(node.target, Loop):
        inside = [
            _line(n, names)
            for graph in node.target.graphs
            for n in graph.nodes
            if _is_notable(n)
        ]
        return "\n".join(
            [
                node_line(node, lambda n: _type(n, names)),
                *("  " + line.replace("\n", "\n  ") for line in inside),
            ]
        )
    if record is None:
        return node_line(node, lambda n: _type(n, names))
    op = f"{record.op}, " if record.op else ""
    text = (
        f"%{node.name} = {record.kind}[{op}{record.axis}](%{node.args[0].name}): "
        f"{value_type(node.meta['val'])}"
    )
    where = f"# {record.source.rsplit('/', 1)[-1]}" if record.source else ""
    return f"  {text:<76} {human_bytes(record.nbytes):<10} {where}".rstrip()


def _type(node: torch.fx.Node, names: tuple[str, ...]) -> str:
    placed = node.meta.get("type")
    return (
        value_type(node.meta["val"])
        if placed is None
        else _placed_type(node, placed, names)
    )


def _placed_type(node: torch.fx.Node, placed: tuple, names: tuple[str, ...]) -> str:
    return tensor_type(placed[0], node.meta["val"].dtype, placed[1], names)


def _result_type(node: torch.fx.Node, marks: tuple, names: tuple[str, ...]) -> str:
    return _type(node, names)
