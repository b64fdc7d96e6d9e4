"""Sums over all graphs of a plan, which count a step of a loop as often as the step runs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..ops.loops import Loop
from ..ops.nodes import args_of
from ..partition import plan
from ..partition.planner import op_cost
from ..partition.planner.plan_price import bodies_of
from ..partition.planner.share import share_of
from ..partition.planner.start_costs import parameter_slots

Sent = tuple[plan.Sending, int]  # a redistribution, and an axis over which it sends
BodyInputs = dict[torch.fx.Node, list[torch.fx.Node]]


def inputs_of_bodies(graph: torch.fx.Graph) -> BodyInputs:
    """Map each placeholder of a loop's or branch's body to its operand in the graph around it."""
    sources: BodyInputs = {}
    for node in graph.nodes:
        if not isinstance(node.target, Loop):
            continue
        for body in node.target.graphs:
            placeholders = body.find_nodes(op="placeholder")
            operands = args_of(node)
            for placeholder, x in zip(placeholders, operands, strict=False):
                sources[placeholder] = [x]
            sources.update(inputs_of_bodies(body))
    return sources


def local_flops(chosen: plan.Plan) -> Iterator[tuple[plan.Apply, torch.fx.Node, float]]:
    """Yield each op of a plan that has FLOPs, with its node and one rank's share of the FLOPs."""
    sizes = chosen.axes.sizes
    for step in chosen.steps:
        if isinstance(step, plan.Apply) and (flops := op_cost.flops(step.node)):
            tensors = (*step.outs, *step.ins)
            slots = [(x.value, x.placements) for x in tensors]
            for axis in range(len(sizes)):
                flops *= share_of(slots, sizes, axis)
            yield step, step.node, flops
    for inner, _, times in bodies_of(chosen):
        for step, node, flops in local_flops(inner):
            yield step, node, flops * times


def implicit_by_size(chosen: plan.Plan, graph: torch.fx.Graph) -> list[Sent]:
    """Return the implicit redistributions of activations, each with its axis, the largest first."""
    ranked = sorted(_sized_implicit(chosen, graph), key=lambda row: -row[0])
    return [sent for _, sent in ranked]


def _sized_implicit(chosen: plan.Plan, graph: torch.fx.Graph) -> Iterator[tuple[float, Sent]]:
    """Yield the implicit redistributions of activations, each with the bytes of its value."""
    parameters = parameter_slots(chosen, graph)
    for step, move in plan.moves(chosen):
        is_parameter = step.source.number in parameters
        if step.implicit and move.sends and not is_parameter:
            yield op_cost.nbytes(step.source.value), (step, move.axis)
    for inner, body, times in bodies_of(chosen):
        for nbytes, sent in _sized_implicit(inner, body):
            yield nbytes * times, sent
