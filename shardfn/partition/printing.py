"""Local programs as text: global sizes with the axes that shard them, collectives with their
bytes.
"""

from __future__ import annotations

import collections
import functools

import torch

from ..buckets import human_bytes
from ..capture.printed_names import dotted_names, printed_names, unique_name
from ..capture.printing import Printer, input_lines, legend, tensor_type, value_type
from ..ops.loops import Loop
from ..types import LocalProgram
from .collective_bytes import collectives_in


def local_text(program: LocalProgram, full: bool = False) -> str:
    """Print a LocalProgram; the short form of a long one shows its collectives."""
    graph = program.graph
    axes = program.axes.names
    printer = printer_of(program, full)
    called, type_of = printer.names, printer.type_of
    holders = graph.find_nodes(op="placeholder")
    coords, tensors = holders[: len(axes)], holders[len(axes) :]
    lines = input_lines(
        [called[h] for h in tensors], program.in_paths, [type_of(h) for h in tensors], full
    )
    lines += [
        f"  coord %{called[coord]}: this rank's index on mesh axis {axis}"
        for coord, axis in zip(coords, axes, strict=True)
        if coord.users
    ]
    lines += printer.body(graph)
    lines += printer.returned(graph, program.out_paths)
    return "\n".join([*_header(program), *legend(lines), *lines])


def printer_of(program: LocalProgram, full: bool = False) -> Printer:
    """Return what prints the nodes of a LocalProgram.

    Args:
        program: of one rank.
        full: whether to print all lines.
    """
    names = printed_names(program.graph, _input_names(program))
    type_of = functools.partial(_type, axes=program.axes.names)
    return Printer(names, type_of, _is_notable, full)


def summary(graph: torch.fx.Graph) -> str:
    """Summarise a graph's collectives: how many of each kind, and their bytes."""
    count = collections.Counter()
    size = collections.Counter()
    for record in collectives_in(graph):
        count[record.kind, record.axis] += 1
        size[record.kind, record.axis] += record.nbytes
    parts = [
        f"{count[kind, axis]} {kind} over {axis}, {human_bytes(size[kind, axis])}"
        for kind, axis in sorted(count)
    ]
    return "; ".join(parts) or "no communication"


def _header(program: LocalProgram) -> list[str]:
    """Return the first lines of a printed program: name, mesh, number of ops, collectives."""
    count = sum(n.op == "call_function" for n in program.graph.nodes)
    where = f"{program.name} on mesh {program.axes}"
    lines = [f"{where}: {count} ops of one rank; {summary(program.graph)}"]
    if program.elided:
        lines.append(f"  {len(program.elided)} collectives over axes of size 1 were removed")
    return lines


def _input_names(program: LocalProgram) -> dict[torch.fx.Node, str]:
    """Name the inputs: tensors by path, coordinates by axis."""
    holders = program.graph.find_nodes(op="placeholder")
    count = len(program.axes.names)
    coords, tensors = holders[:count], holders[count:]
    names = dotted_names(program.in_paths)
    taken = set(names)
    called = dict(zip(tensors, names, strict=True))
    for coord, axis in zip(coords, program.axes.names, strict=True):
        called[coord] = unique_name(f"coord_{axis}", taken)
    return called


def _is_notable(node: torch.fx.Node) -> bool:
    """Return whether the short form shows a node: collectives and loops."""
    return "collective" in node.meta or isinstance(node.target, Loop)


def _type(node: torch.fx.Node, axes: tuple[str, ...]) -> str:
    """Write the type of a node: dtype, global shape and the axes that shard it."""
    value = node.meta["val"]
    placed = node.meta.get("type")
    if placed is None:
        return value_type(value)
    shape, placements = placed
    return tensor_type(shape, value.dtype, placements, axes)
