"""A program in which one step stands for each loop, and both branches for each cond, so that their
ops are planned together with those around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.fx import Graph, Node

from ...ops.loops import Branch, Loop, Scan, While, loop_of
from ...ops.nodes import args_of
from ...types import MeshPlacements, Program
from ..propagation.values import Advice, Placed
from . import op_cost

ATEN = torch.ops.aten
Env = dict[Node, Node]  # nodes of a program, and their copies


@attrs.define(eq=False)
class InlinedProgram:
    """A program whose loops and branches are inlined: one step per loop, both branches per cond.

    Args:
        program: the Program.
        originals: for the copy of an op, that op, in the program or in a body.
        times: how often values of a body are made, and so moved.
        edges: ops that stand where the carries of a loop enter a step, and where they leave it.
        joined: ops that stand where two values must be placed alike: the two results of a cond,
            with that cond and the position, or a carry before and after a turn of a while loop.
        rows: the stacked inputs of scans, of which no step dim is sharded.
    """

    program: Program
    originals: Env = attrs.field(factory=dict)
    times: dict[Node, int] = attrs.field(factory=dict)
    edges: list[Node] = attrs.field(factory=list)
    joined: dict[Node, tuple[Node, int] | None] = attrs.field(factory=dict)
    rows: set[Node] = attrs.field(factory=set)

    def made(self, node: Node) -> int:
        """Return how often a value is made in one run of the program."""
        return self.times.get(node, 1)

    def computed(self, node: Node) -> int:
        """Return how often an op runs; the copies at loop edges and joints compute nothing."""
        is_idle = node in self.edges or node in self.joined
        return 0 if is_idle else self.made(node)

    def advice(self, decided: Mapping[Node, Placed]) -> Advice:
        """Translate placements of the inlined program to the original ops, carries and branches."""
        ops = {}
        carries: dict[tuple[int, ...], MeshPlacements] = {}
        branches = {}
        for node, placed in decided.items():
            original = self.originals.get(node)
            if original is not None:
                ops[original] = placed
            elif node in self.edges:
                shape = tuple(node.meta["val"].shape)
                (carries[shape],) = placed.outs
        for node, result in self.joined.items():
            if result is not None and node in decided:
                (branches[result],) = decided[node].outs
        return Advice(ops, carries, branches)


def inlined(program: Program) -> InlinedProgram:
    """Inline one step of each loop and both branches of each cond; a program without them is
    returned as it is.
    """
    graph = program.graph.graph
    found = InlinedProgram(program)
    has_bodies = any(isinstance(node.target, Loop) for node in graph.nodes)
    if not has_bodies:
        return found
    fresh = Graph()
    env: Env = {}
    _copy(fresh, graph.nodes, env, 1, found)
    (output,) = graph.find_nodes(op="output")
    fresh.node_copy(output, env.__getitem__)
    module = torch.fx.GraphModule(torch.nn.Module(), fresh)
    found.program = attrs.evolve(program, graph=module)
    return found


def _copy(fresh: Graph, nodes: Iterable[Node], env: Env, times: int, found: InlinedProgram) -> None:
    """Copy nodes into the new graph, with loops and branches inlined."""
    stepped: dict[Node, list[Node]] = {}
    for node in nodes:
        if node in env or node.op == "output":
            continue
        source = next(iter(node.all_input_nodes), None)
        if source in stepped:
            _, position = args_of(node)
            env[node] = stepped[source][position]
        elif isinstance(node.target, Loop):
            inline = INLINE[type(node.target)]
            stepped[node] = inline(fresh, node, env, times, found)
        else:
            copy = fresh.node_copy(node, env.__getitem__)
            env[node] = copy
            found.originals[copy] = node
            found.times[copy] = times


def _body(
    fresh: Graph, body: Graph, given: Iterable[Node], times: int, found: InlinedProgram
) -> list[Node]:
    """Copy the nodes of a body, given its inputs. Returns copies of its results."""
    holders = body.find_nodes(op="placeholder")
    within = dict(zip(holders, given, strict=True))
    _copy(fresh, body.nodes, within, times, found)
    (output,) = body.find_nodes(op="output")
    (returned,) = args_of(output)
    return [within[x] for x in returned]


def _step(fresh: Graph, node: Node, env: Env, times: int, found: InlinedProgram) -> list[Node]:
    """Inline one step of a scan. Returns copies of its results."""
    scan = node.target
    assert isinstance(scan, Scan)
    inner = times * op_cost.turns(scan)
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
    results = _body(fresh, scan.graphs[0], given, inner, found)
    leaving = map(around.edge, results[: scan.carries])
    stepwise = results[scan.carries :]
    stacked = [around.stacked(x, scan.length) for x in stepwise]
    return [*leaving, *stacked]


def _turn(fresh: Graph, node: Node, env: Env, times: int, found: InlinedProgram) -> list[Node]:
    """Inline one iteration of a while loop, its test and its step. Returns copies of its
    results.
    """
    loop = node.target
    assert isinstance(loop, While)
    inner = times * op_cost.turns(loop)
    around = _Ends(fresh, node, times, found)
    inside = _Ends(fresh, node, inner, found)
    read = [env[x] for x in args_of(node)]
    consts = read[: loop.consts]
    carries = read[loop.consts :]
    entering = [inside.edge(x) for x in carries]
    given = [*consts, *entering]
    test, step = loop.graphs
    (truth,) = _body(fresh, test, given, inner, found)
    results = _body(fresh, step, given, inner, found)
    pairs = zip(results, entering, strict=True)
    joints = [inside.joint(truth, new, old) for new, old in pairs]
    return [around.edge(x) for x in joints]


def _branches(fresh: Graph, node: Node, env: Env, times: int, found: InlinedProgram) -> list[Node]:
    """Inline both branches of a cond. Returns copies of its results."""
    *read, truth = [env[x] for x in args_of(node)]
    ends = _Ends(fresh, node, times, found)
    first, second = loop_of(node).graphs
    yes = _body(fresh, first, read, times, found)
    no = _body(fresh, second, read, times, found)
    results = []
    for k, (a, b) in enumerate(zip(yes, no, strict=True)):
        made = ends.joint(truth, a, b, (node, k))
        results.append(made)
    return results


INLINE: dict[type[Loop], Callable[..., list[Node]]] = {Scan: _step, While: _turn, Branch: _branches}


@attrs.frozen(eq=False)
class _Ends:
    """Makes the ops that stand where values enter and leave an inlined body.

    Args:
        fresh: takes them.
        loop: of the body.
        times: how often they run.
        found: notes them.
    """

    fresh: Graph
    loop: Node
    times: int
    found: InlinedProgram

    def call(self, op: Any, args: Sequence[Any], value: torch.Tensor) -> Node:
        """Add an op with the metadata of the loop."""
        made = self.fresh.call_function(op, tuple(args))
        made.meta = {**self.loop.meta, "val": value}
        self.found.times[made] = self.times
        return made

    def edge(self, x: Node) -> Node:
        """Add the identity that stands where a carry enters or leaves a step."""
        made = self.call(ATEN.clone.default, (x,), x.meta["val"])
        self.found.edges.append(made)
        return made

    def joint(self, truth: Node, a: Node, b: Node, result: tuple[Node, int] | None = None) -> Node:
        """Add the `where` that stands for a choice between two values, which are placed alike."""
        made = self.call(ATEN.where.self, (truth, a, b), a.meta["val"])
        self.found.joined[made] = result
        return made

    def row(self, x: Node) -> Node:
        """Add the `select` of one row of a stacked input."""
        value = x.meta["val"]
        row = value.new_empty(value.shape[1:])
        return self.call(ATEN.select.int, (x, 0, 0), row)

    def stacked(self, x: Node, length: int) -> Node:
        """Add the ops that stack a per-step output."""
        value = x.meta["val"]
        one = value.new_empty((1, *value.shape))
        many = value.new_empty((length, *value.shape))
        row = self.call(ATEN.unsqueeze.default, (x, 0), one)
        rows = self.call(ATEN.expand.default, (row, list(many.shape)), many)
        return self.call(ATEN.clone.default, (rows,), many)
