"""The steps of a plan in all its graphs: those of loops and branches count as often as they run."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..ops.loops import Loop
from ..ops.nodes import args_of
from ..partition import plan
from ..partition.planner import work
from ..partition.planner.price import bodies_of
from ..partition.planner.share import share_of
from ..partition.planner.starts import parameter_slots

Sent = tuple[plan.Redistribute, int]  # a redistribution, and an axis over which it sends
Around = dict[torch.fx.Node, list[torch.fx.Node]]


def outside(graph: torch.fx.Graph) -> Around:
    """For the inputs of the bodies in a graph, what stands for them around the loop or branch."""
    found: Around = {}
    for node in graph.nodes:
        if not isinstance(node.target, Loop):
            continue
        for body in node.target.graphs:
            holders = body.find_nodes(op="placeholder")
            read = args_of(node)
            for holder, x in zip(holders, read, strict=False):
                found[holder] = [x]
            found.update(outside(body))
    return found


def work_of(chosen: plan.Plan) -> Iterator[tuple[plan.Apply, torch.fx.Node, float]]:
    """The ops of a plan with FLOPs, and those of one rank."""
    sizes = chosen.axes.sizes
    for step in chosen.steps:
        if isinstance(step, plan.Apply) and (flops := work.flops(step.node)):
            tensors = (*step.outs, *step.ins)
            slots = [(x.value, x.marks) for x in tensors]
            for axis in range(len(sizes)):
                flops *= share_of(slots, sizes, axis)
            yield step, step.node, flops
    for inner, _, times in bodies_of(chosen):
        for step, node, flops in work_of(inner):
            yield step, node, flops * times


def largest_unasked(chosen: plan.Plan, graph: torch.fx.Graph) -> list[Sent]:
    """The redistributions of activations that no placement asks for, each with its axis, the
    largest first.
    """
    found = _unasked(chosen, graph)
    rows = sorted(found, key=lambda row: -row[0])
    return [sent for _, sent in rows]


def _unasked(chosen: plan.Plan, graph: torch.fx.Graph) -> Iterator[tuple[float, Sent]]:
    """The redistributions that no placement asks for, each with the bytes of its value."""
    ahead = parameter_slots(chosen, graph)
    for step, move in plan.moves(chosen):
        is_parameter = step.source.number in ahead
        if step.implicit and move.sends and not is_parameter:
            yield work.nbytes(step.source.value), (step, move.axis)
    for inner, body, times in bodies_of(chosen):
        for nbytes, sent in _unasked(inner, body):
            yield nbytes * times, sent
