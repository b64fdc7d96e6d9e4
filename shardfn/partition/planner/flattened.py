"""A program in which one step stands for each scan, so that the ops of loops are planned together
with those around them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs
import torch

from ...ops.loops import Scan
from ...ops.nodes import args_of
from ...types import Marks, Program
from ..propagation.values import Advice, Placed

ATEN = torch.ops.aten
Env = dict[torch.fx.Node, torch.fx.Node]  # nodes of a program, and their copies


@attrs.frozen(eq=False)
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
    originals: Env
    times: dict[torch.fx.Node, int]
    edges: list[torch.fx.Node]
    rows: set[torch.fx.Node]

    def made(self, node: torch.fx.Node) -> int:
        """How often a value is made in the program."""
        return self.times.get(node, 1)

    def computed(self, node: torch.fx.Node) -> int:
        """How often an op runs in the program."""
        return 0 if node in self.edges else self.made(node)

    def advice(self, decided: Mapping[torch.fx.Node, Placed]) -> Advice:
        """A plan of this program as one of the program with its scans."""
        ops = {
            self.originals[node]: placed
            for node, placed in decided.items()
            if node in self.originals
        }
        carries: dict[tuple[int, ...], Marks] = {}
        for node in self.edges:
            if node in decided:
                (marks,) = decided[node].outs
                carries[tuple(node.meta["val"].shape)] = marks
        return Advice(ops, carries)


def flattened(program: Program) -> Flattened:
    """A program with one step in place of each scan. The same program if it has no scans."""
    graph = program.graph.graph
    found = Flattened(program, {}, {}, [], set())
    if not any(isinstance(node.target, Scan) for node in graph.nodes):
        return found
    fresh = torch.fx.Graph()
    env: Env = {}
    _copy(fresh, graph.nodes, env, 1, found)
    (output,) = graph.find_nodes(op="output")
    fresh.node_copy(output, env.__getitem__)
    module = torch.fx.GraphModule(torch.nn.Module(), fresh)
    return attrs.evolve(found, program=attrs.evolve(program, graph=module))


def _copy(
    fresh: torch.fx.Graph,
    nodes: Collection[torch.fx.Node],
    env: Env,
    times: int,
    found: Flattened,
) -> None:
    """Copy nodes that run so many times, scans as one of their steps."""
    stepped: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node in nodes:
        if node in env or node.op == "output":
            continue
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        if source in stepped:
            env[node] = stepped[source][node.args[1]]
        elif isinstance(node.target, Scan):
            stepped[node] = _step(fresh, node, env, times, found)
        else:
            env[node] = fresh.node_copy(node, env.__getitem__)
            found.originals[env[node]] = node
            found.times[env[node]] = times


def _step(
    fresh: torch.fx.Graph,
    node: torch.fx.Node,
    env: Env,
    times: int,
    found: Flattened,
) -> list[torch.fx.Node]:
    """Copy one step of a scan. Returns copies of its results."""
    scan = node.target
    assert isinstance(scan, Scan)
    inner = times * max(scan.length, 1)
    around, inside = (_Ends(fresh, node, n, found) for n in (times, inner))
    read = [env[x] for x in args_of(node)]
    end = scan.consts + scan.carries
    found.rows.update(read[end:])
    given = [
        *read[: scan.consts],
        *map(inside.edge, read[scan.consts : end]),
        *map(inside.row, read[end:]),
    ]
    (body,) = scan.graphs
    holders = body.find_nodes(op="placeholder")
    within = dict(zip(holders, given, strict=True))
    _copy(fresh, body.nodes, within, inner, found)
    (output,) = body.find_nodes(op="output")
    results = [within[x] for x in args_of(output)[0]]
    return [
        *map(around.edge, results[: scan.carries]),
        *(around.stacked(x, scan.length) for x in results[scan.carries :]),
    ]


@attrs.frozen(eq=False)
class _Ends:
    """The ops at both ends of a step.

    Args:
        fresh: takes them.
        scan: of the step.
        times: how often they run.
        found: notes them.
    """

    fresh: torch.fx.Graph
    scan: torch.fx.Node
    times: int
    found: Flattened

    def call(
        self, op: torch._ops.OpOverload, args: Sequence[Any], value: torch.Tensor
    ) -> torch.fx.Node:
        made = self.fresh.call_function(op, tuple(args))
        made.meta = {**self.scan.meta, "val": value}
        self.found.times[made] = self.times
        return made

    def edge(self, x: torch.fx.Node) -> torch.fx.Node:
        """A carry where it enters a step, or leaves it."""
        made = self.call(ATEN.clone.default, (x,), x.meta["val"])
        self.found.edges.append(made)
        return made

    def row(self, x: torch.fx.Node) -> torch.fx.Node:
        """One row of a stacked input."""
        value = x.meta["val"]
        row = value.new_empty(value.shape[1:])
        return self.call(ATEN.select.int, (x, 0, 0), row)

    def stacked(self, x: torch.fx.Node, length: int) -> torch.fx.Node:
        """A per-step output, stacked."""
        value = x.meta["val"]
        one = value.new_empty((1, *value.shape))
        many = value.new_empty((length, *value.shape))
        row = self.call(ATEN.unsqueeze.default, (x, 0), one)
        rows = self.call(ATEN.expand.default, (row, list(many.shape)), many)
        return self.call(ATEN.clone.default, (rows,), many)
