"""A program in which one step stands for each scan, so that the ops of loops are planned together
with those around them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.fx import Graph, Node

from ...ops.loops import Scan
from ...ops.nodes import args_of
from ...types import Marks, Program
from ..propagation.values import Advice, Placed

ATEN = torch.ops.aten
Env = dict[Node, Node]  # nodes of a program, and their copies


@attrs.define(eq=False)
class Flattened:
    """A program without scans.

    Args:
        program: the Program.
        originals: for the copy of an op, that op, in the program or in the body of a scan.
        times: how often values of a body are made, and so moved.
        edges: ops that stand where the carries of a scan enter a step, and where they leave it.
            They compute nothing.
        rows: the stacked inputs of scans, of which no step dim is sharded.
    """

    program: Program
    originals: Env = attrs.field(factory=dict)
    times: dict[Node, int] = attrs.field(factory=dict)
    edges: list[Node] = attrs.field(factory=list)
    rows: set[Node] = attrs.field(factory=set)

    def made(self, node: Node) -> int:
        """How often a value is made in the program."""
        return self.times.get(node, 1)

    def computed(self, node: Node) -> int:
        """How often an op runs in the program."""
        return 0 if node in self.edges else self.made(node)

    def advice(self, decided: Mapping[Node, Placed]) -> Advice:
        """A plan of this program as one of the program with its scans."""
        ops = {}
        carries: dict[tuple[int, ...], Marks] = {}
        for node, placed in decided.items():
            original = self.originals.get(node)
            if original is not None:
                ops[original] = placed
            elif node in self.edges:
                shape = tuple(node.meta["val"].shape)
                (carries[shape],) = placed.outs
        return Advice(ops, carries)


def flattened(program: Program) -> Flattened:
    """A program with one step in place of each scan. The same program if it has no scans."""
    graph = program.graph.graph
    found = Flattened(program)
    has_scans = any(isinstance(node.target, Scan) for node in graph.nodes)
    if not has_scans:
        return found
    fresh = Graph()
    env: Env = {}
    _copy(fresh, graph.nodes, env, 1, found)
    (output,) = graph.find_nodes(op="output")
    fresh.node_copy(output, env.__getitem__)
    module = torch.fx.GraphModule(torch.nn.Module(), fresh)
    found.program = attrs.evolve(program, graph=module)
    return found


def _copy(
    fresh: Graph,
    nodes: Iterable[Node],
    env: Env,
    times: int,
    found: Flattened,
) -> None:
    """Copy nodes that run so many times, scans as one of their steps."""
    stepped: dict[Node, list[Node]] = {}
    for node in nodes:
        if node in env or node.op == "output":
            continue
        source = next(iter(node.all_input_nodes), None)
        if source in stepped:
            _, position = args_of(node)
            env[node] = stepped[source][position]
        elif isinstance(node.target, Scan):
            stepped[node] = _step(fresh, node, env, times, found)
        else:
            copy = fresh.node_copy(node, env.__getitem__)
            env[node] = copy
            found.originals[copy] = node
            found.times[copy] = times


def _step(
    fresh: Graph,
    node: Node,
    env: Env,
    times: int,
    found: Flattened,
) -> list[Node]:
    """Copy one step of a scan. Returns copies of its results."""
    scan = node.target
    assert isinstance(scan, Scan)
    inner = times * max(scan.length, 1)
    around = _Ends(fresh, node, times, found)
    inside = _Ends(fresh, node, inner, found)
    read = [env[x] for x in args_of(node)]
    start = scan.consts
    end = start + scan.carries
    stacks = read[end:]
    found.rows.update(stacks)
    entering = map(inside.edge, read[start:end])
    rows = map(inside.row, stacks)
    given = [*read[:start], *entering, *rows]
    (body,) = scan.graphs
    holders = body.find_nodes(op="placeholder")
    within = dict(zip(holders, given, strict=True))
    _copy(fresh, body.nodes, within, inner, found)
    (output,) = body.find_nodes(op="output")
    (returned,) = args_of(output)
    results = [within[x] for x in returned]
    leaving = map(around.edge, results[: scan.carries])
    stepwise = results[scan.carries :]
    stacked = [around.stacked(x, scan.length) for x in stepwise]
    return [*leaving, *stacked]


@attrs.frozen(eq=False)
class _Ends:
    """The ops at both ends of a step.

    Args:
        fresh: takes them.
        scan: of the step.
        times: how often they run.
        found: notes them.
    """

    fresh: Graph
    scan: Node
    times: int
    found: Flattened

    def call(
        self, op: Any, args: Sequence[Any], value: torch.Tensor
    ) -> Node:
        made = self.fresh.call_function(op, tuple(args))
        made.meta = {**self.scan.meta, "val": value}
        self.found.times[made] = self.times
        return made

    def edge(self, x: Node) -> Node:
        """A carry where it enters a step, or leaves it."""
        made = self.call(ATEN.clone.default, (x,), x.meta["val"])
        self.found.edges.append(made)
        return made

    def row(self, x: Node) -> Node:
        """One row of a stacked input."""
        value = x.meta["val"]
        row = value.new_empty(value.shape[1:])
        return self.call(ATEN.select.int, (x, 0, 0), row)

    def stacked(self, x: Node, length: int) -> Node:
        """A per-step output, stacked."""
        value = x.meta["val"]
        one = value.new_empty((1, *value.shape))
        many = value.new_empty((length, *value.shape))
        row = self.call(ATEN.unsqueeze.default, (x, 0), one)
        rows = self.call(ATEN.expand.default, (row, list(many.shape)), many)
        return self.call(ATEN.clone.default, (rows,), many)
