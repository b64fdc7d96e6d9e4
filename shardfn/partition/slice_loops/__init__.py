"""Loops over the slices of a sharded dim, as one batched computation.

A loop such as `for e in range(E): y = y + gate[:, e, None] * f(x, up[e])` reads one slice of `up`
in each turn. If ranks hold different slices, every slice would be gathered, op by op. Here an op
that all turns have becomes one op with a first dim of turns, which is placed like the dim of the
slices; what adds, stacks or concatenates the results of all turns becomes one op as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch.fx import Graph, GraphModule, Node

from ...types import MeshAxes, MeshPlacements, Program
from .. import rules
from ..layout import split
from .batch import Unbatched, batched
from .search import Search
from .slices import Slices, slices_of

HELD = "shardfn_slice_loops"  # the key under which the graph of a program holds the batched ones

__all__ = ["batched_loops"]


def batched_loops(
    program: Program, axes: MeshAxes, in_placements: Sequence[MeshPlacements]
) -> Program:
    """Batch the loops of a Program over slices of sharded inputs.

    Args:
        program: the Program.
        axes: names and sizes of the mesh.
        in_placements: the placement of each input.

    Returns:
        A Program with the same results; the one given if it has no such loop.
    """
    loops = _sharded_slices(program.graph.graph, axes, in_placements)
    if not loops:
        return program
    known = program.graph.meta.setdefault(HELD, {})
    if loops not in known:
        made = program
        for turns in sorted({x.turns for x in loops}):
            made = _batched(made, turns, axes, in_placements)
        known[loops] = made
    return known[loops]


def _batched(
    program: Program, turns: int, axes: MeshAxes, in_placements: Sequence[MeshPlacements]
) -> Program:
    """Batch the loops with a given number of turns."""
    graph = program.graph.graph
    loop = Search(graph, turns, _sharded_slices(graph, axes, in_placements)).run()
    if not any(op.reads_sharded for op in loop.ops):
        return program
    try:
        fresh = batched(graph, loop)
    except Unbatched:
        return program
    return attrs.evolve(program, graph=GraphModule(torch.nn.Module(), fresh))


def _sharded_slices(
    graph: Graph, axes: MeshAxes, in_placements: Sequence[MeshPlacements]
) -> frozenset[Slices]:
    """Return what ops read one index at a time of a dim along which ranks hold different parts."""
    read = {found[0] for node in graph.nodes if (found := slices_of(node))}
    read = {x for x in read if x.width in (None, 1) and x.turns > 1}
    if not read:
        return frozenset()
    sharded = _sharded_dims(graph, axes, in_placements)
    return frozenset(x for x in read if x.dim in sharded.get(x.source, ()))


def _sharded_dims(
    graph: Graph, axes: MeshAxes, in_placements: Sequence[MeshPlacements]
) -> dict[Node, set[int]]:
    """Return the dims along which ranks hold different parts of an input, or of what is computed
    from it element by element.
    """
    found: dict[Node, set[int]] = {}
    inputs = graph.find_nodes(op="placeholder")
    for node, placements in zip(inputs, in_placements, strict=True):
        cuts = [split(x) for x, n in zip(placements, axes.sizes, strict=True) if n > 1]
        found[node] = {cut[0] for cut in cuts if cut is not None}
    for node in graph.nodes:
        if node.op == "call_function" and rules.is_pointwise(node.target):
            shape = _shape(node)
            like = [x for x in node.all_input_nodes if _shape(x) == shape]
            found[node] = set().union(*(found.get(x, ()) for x in like))
    return found


def _shape(node: Node) -> tuple[int, ...] | None:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None
