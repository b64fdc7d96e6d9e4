"""The pipelines of a saved program: bound to the process groups of a mesh, and checked, since the
file may come from anybody.

All coordinates of the axis are run without values: each instruction reads values that exist, of
the shapes that it says, and each message that is sent is received.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.fx import Graph, Node

from ...ops.loops import graph_outputs
from ...ops.messages import Receive, Ref, Send
from ...ops.pipeline import Add, Free, Pipeline, Run, Zero
from ...types import Aval, LocalProgram, MeshAxes

Coordinate = tuple[int, ...]
Form = tuple[tuple[int, ...], torch.dtype]  # what is compared of a tensor


def bind_pipelines(graph: Graph, names: Mapping[str, str]) -> None:
    """Give the messages of a graph's pipelines the process groups of their axes.

    Args:
        graph: of one rank, changed in place.
        names: of the groups, by axis.

    Raises:
        KeyError: a message is over no axis of the mesh.
    """
    for node in pipelines_of(graph):
        pipeline: Any = node.target
        instructions = [
            attrs.evolve(x, group=names[x.axis]) if isinstance(x, (Send, Receive)) else x
            for x in pipeline.instructions
        ]
        node.target = attrs.evolve(pipeline, instructions=tuple(instructions))


def pipelines_of(graph: Graph) -> list[Node]:
    """List the nodes of a graph that run a pipeline."""
    return [node for node in graph.nodes if isinstance(node.target, Pipeline)]


def check_pipelines(programs: Mapping[Coordinate, LocalProgram], axes: MeshAxes) -> None:
    """Check the pipelines of all ranks.

    Raises:
        ValueError: one reads what does not exist, or ranks wait for each other.
    """
    nodes = {at: pipelines_of(program.graph) for at, program in programs.items()}
    if len({len(row) for row in nodes.values()}) > 1:
        raise ValueError("ranks have different numbers of pipelines")
    count = len(next(iter(nodes.values())))
    for k in range(count):
        (axis,) = {_axis_of(row[k].target, axes) for row in nodes.values()}
        lines = collections.defaultdict(dict[int, Node])
        for at, row in nodes.items():
            lines[at[:axis] + at[axis + 1 :]][at[axis]] = row[k]
        for line in lines.values():
            _check_line([line[c] for c in range(axes.sizes[axis])], len(axes.names))


def _axis_of(pipeline: Any, axes: MeshAxes) -> int:
    """The mesh axis of a pipeline's messages; the first for one without."""
    found = {x.axis for x in pipeline.instructions if isinstance(x, (Send, Receive))}
    if len(found) > 1:
        raise ValueError("a pipeline over two axes")
    return axes.names.index(found.pop()) if found else 0


def _check_line(nodes: Sequence[Node], dims: int) -> None:
    """Run the coordinates of one pipeline, each as far as its messages are sent."""
    sent: dict[tuple[int, int, int], Form] = {}
    parts = [_Part(node, c, dims, sent).steps() for c, node in enumerate(nodes)]
    while parts:
        before = len(sent), len(parts)
        progress = [next(part, None) for part in parts]
        parts = [part for part, at in zip(parts, progress, strict=True) if at is not None]
        if (len(sent), len(parts)) == before and not any(progress):
            raise ValueError("the pipeline ranks wait for each other for ever")
    if sent:
        raise ValueError("a message that nobody receives")


class _Part:
    """One coordinate of a pipeline, without values."""

    def __init__(
        self, node: Node, coordinate: int, dims: int, sent: dict[tuple[int, int, int], Form]
    ) -> None:
        self.node, self.coordinate, self.sent = node, coordinate, sent
        target = node.target
        assert isinstance(target, Pipeline)
        self.pipeline = target
        values = [x.meta["val"] for x in node.args if isinstance(x, Node)]
        if target.coordinates != dims or len(values) != len(node.args) or len(values) < dims:
            raise ValueError(f"{node}: the arguments of a pipeline")
        self.first, self.inputs = values[:dims], values[dims:]
        self.values: dict[Ref, Form] = {}

    def steps(self) -> Iterator[bool]:
        """Run the instructions. Yield True after each, and False while its message is not sent."""
        for x in self.pipeline.instructions:
            if isinstance(x, Receive):
                while self.key(x) not in self.sent:
                    yield False
            self.step(x)
            yield True
        results = [self.result(ref) for ref in self.pipeline.results]
        self.same(results, [_form(x) for x in self.node.meta["val"]])

    def step(self, x: Any) -> None:
        """Run one instruction."""
        if isinstance(x, Run):
            graph = self.pipeline.graphs[x.graph]
            holders = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
            if any(_reach(value) > value.numel() for value in holders):
                raise ValueError(f"{self.node}: the strides are invalid")
            reads = [_form(value) for value in self.first] + [*map(self.look, x.reads)]
            self.same(reads, [_form(value) for value in holders])
            outs = [_form(value) for value in graph_outputs(graph)]
            self.values.update(zip(x.makes, outs, strict=True))
        elif isinstance(x, Send):
            self.same([self.look(x.message.value)], [_form_of(x.message.aval)])
            self.sent[self.key(x)] = _form_of(x.message.aval)
        elif isinstance(x, Receive):
            self.same([self.sent.pop(self.key(x))], [_form_of(x.message.aval)])
            self.values[x.message.value] = _form_of(x.message.aval)
        elif isinstance(x, Zero):
            self.values[x.total] = _form_of(x.aval)
        elif isinstance(x, Add):
            self.same([self.look(x.total)], [self.look(x.term)])
        elif isinstance(x, Free):
            for ref in x.values:
                self.values.pop(ref, None)

    def key(self, x: Send | Receive) -> tuple[int, int, int]:
        """The ends and the number of a message of this coordinate."""
        message = x.message
        own, other = message.source, message.target
        if isinstance(x, Receive):
            own, other = other, own
        if own != self.coordinate or other == own:
            raise ValueError(f"{self.node}: a message of another coordinate")
        return message.source, message.target, message.number

    def look(self, ref: Ref) -> Form:
        """The form of a value."""
        if ref in self.values:
            return self.values[ref]
        kind, *numbers = ref
        if kind == "in":
            return _form(self.inputs[numbers[0]])
        if kind == "row":
            shape, dtype = _form(self.inputs[numbers[0]])
            if numbers[1] < shape[0]:
                return shape[1:], dtype
        raise ValueError(f"{self.node}: {ref} is read before it is computed")

    def result(self, ref: Ref) -> Form:
        """The form of a result."""
        if ref[0] != "stack":
            return self.look(ref)
        rows = {self.look(("value", ref[1], k)) for k in range(self.pipeline.length)}
        ((shape, dtype),) = rows
        return (self.pipeline.length, *shape), dtype

    def same(self, given: Sequence[Form], wanted: Sequence[Form]) -> None:
        """Refuse values of other shapes or dtypes."""
        if [*given] != [*wanted]:
            raise ValueError(f"{self.node}: an instruction reads values whose shapes do not match")


def _form(x: torch.Tensor) -> Form:
    return tuple(x.shape), x.dtype


def _form_of(x: Aval) -> Form:
    """The form of a message or a sum, which is dense.

    Raises:
        ValueError: it is not.
    """
    spans = zip(x.shape, x.stride, strict=True)
    count = math.prod(x.shape)
    if count and 1 + sum((n - 1) * s for n, s in spans) != count:
        raise ValueError(f"{x} must be dense")
    return tuple(x.shape), x.dtype


def _reach(x: torch.Tensor) -> int:
    """The number of elements between the first and the last of a tensor."""
    spans = zip(x.shape, x.stride(), strict=True)
    return 1 + sum((n - 1) * s for n, s in spans) if x.numel() else 0
