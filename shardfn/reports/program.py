"""The program of a rank, folded by module and line."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
from torch.fx import Graph, Node

from ..capture.printing import Printer, graph_titles
from ..ops.loops import Loop, loop_of
from ..partition.printing import printer_of
from ..source_text import located_in_program
from ..types import LocalProgram
from .parts import parts_of

MOST_LINES = 6000  # of the page; of a larger program it shows collectives and loops


@attrs.frozen
class Block:
    """Ops of one module; or, without a module, of one line.

    Args:
        title: the path of the module, the line, or a part of the step.
        lines: the ops as text, and the blocks of modules or loops inside.
        ops: how many ops it has, those inside included.
        left_out: how many of them the lines leave out.
    """

    title: str
    lines: tuple[Any, ...]
    ops: int
    left_out: int = 0

    def contents(self) -> list[Any]:
        """Return the block as lists of JSON: title, ops, left out, lines."""
        lines = [x.contents() if isinstance(x, Block) else x for x in self.lines]
        return [self.title, self.ops, self.left_out, lines]


def program_rows(programs: Sequence[LocalProgram]) -> dict[str, Any]:
    """Return the programs of a step as blocks, and whether ops are left out.

    Args:
        programs: of one rank, one after the other.
    """
    ops = sum(ops_of(program.graph) for program in programs)
    is_outline = ops > MOST_LINES
    blocks = [_program(x, is_outline=is_outline).contents() for x in programs]
    return {"ops": ops, "outline": is_outline, "blocks": blocks}


def _program(program: LocalProgram, *, is_outline: bool) -> Block:
    writer = _Writer(printer_of(program, full=False), is_outline)
    return _block_of(program.name, writer.blocks(program.graph))


def ops_of(graph: Graph) -> int:
    """Return the number of ops of a graph, those of loops once."""
    count = 0
    for node in graph.nodes:
        count += node.op == "call_function"
        if isinstance(node.target, Loop):
            count += sum(map(ops_of, loop_of(node).graphs))
    return count


@attrs.frozen
class _Writer:
    """Writes graphs as blocks."""

    printer: Printer
    is_outline: bool

    def blocks(self, graph: Graph) -> list[Block]:
        """Write a graph: a block for its forward, its backward and what follows, if it has them."""
        nodes = [node for node in graph.nodes if node.op == "call_function"]
        parts = _by_part(nodes)
        blocks = {part: self.layers(same) for part, same in parts.items()}
        if len(blocks) == 1:
            return next(iter(blocks.values()))
        return [_block_of(part, inner) for part, inner in blocks.items()]

    def layers(self, nodes: Sequence[Node]) -> list[Block]:
        """Write ops as a block for each layer, with the blocks of its modules inside."""
        layers = []
        for layer, same in _grouped(nodes, _layer).items():
            inner = [self.block(title, ops) for title, ops in _grouped(same, _place).items()]
            layers.append(inner[0] if len(inner) == 1 else _block_of(layer, inner))
        return layers

    def block(self, title: str, nodes: Sequence[Node]) -> Block:
        """Write the ops of one module, in their order."""
        lines: list[Any] = []
        ops = left_out = 0
        for node in nodes:
            ops += 1
            if self.is_outline and not self.printer.notable(node):
                left_out += 1
                continue
            lines.append(self.printer.lines(node)[0].strip())
            for body in self.bodies(node):
                lines.append(body)
                ops += body.ops
                left_out += body.left_out
        return Block(title, tuple(lines), ops, left_out)

    def bodies(self, node: Node) -> Iterator[Block]:
        """Yield a block for each graph of a loop."""
        if not isinstance(node.target, Loop):
            return
        loop = loop_of(node)
        for title, graph in zip(graph_titles(loop), loop.graphs, strict=True):
            yield _block_of(title, self.blocks(graph))


def _block_of(title: str, inner: Sequence[Block]) -> Block:
    """Return a block of blocks. Those without lines are left out."""
    lines = tuple(x for x in inner if x.lines)
    return Block(title, lines, sum(x.ops for x in inner), sum(x.left_out for x in inner))


def _grouped(nodes: Sequence[Node], key: Callable[[Node], str]) -> dict[str, list[Node]]:
    """Group nodes by a text, in the order of the first of each group."""
    groups = collections.defaultdict[str, list[Node]](list)
    for node in nodes:
        groups[key(node)].append(node)
    return groups


def _by_part(nodes: Sequence[Node]) -> dict[str, list[Node]]:
    """Group ops by the part of the step that they belong to."""
    groups = collections.defaultdict[str, list[Node]](list)
    parts = parts_of([node.meta.get("phase", "") for node in nodes])
    for node, part in zip(nodes, parts, strict=True):
        groups[part].append(node)
    return groups


def _place(node: Node) -> str:
    """Return the module of an op, or its line."""
    record = node.meta.get("collective")
    module = record.module if record else node.meta.get("module")
    source = record.source if record else node.meta.get("source")
    return module or located_in_program(source, None) or "no line"


def _layer(node: Node) -> str:
    """Return the path of the layer that an op belongs to: up to the first number, or the first
    name.
    """
    names = _place(node).split(".")
    if ":" in names[-1] or len(names) == 1:  # a line
        return _place(node)
    numbers = [k for k, name in enumerate(names) if name.isdigit()]
    return ".".join(names[: numbers[0] + 1 if numbers else 1])
