"""Which collectives start while others run, so that their latency does not count: gathers of
parameters, and reductions of gradients.
"""

from __future__ import annotations

import attrs
import torch

from ...hardware import H100, SENT, Hardware
from ...ops.nodes import args_of
from ...ops.placement import ALIGN
from ...types import Cost, MeshAxes
from .. import plan, rules

# The bytes that a rank could send in the time that a collective takes to start.
START = H100.latency * SENT


def with_start_costs(axes: MeshAxes, *, is_ahead: bool) -> MeshAxes:
    """Return the axes with the cost of sending over each, with or without the start of a
    collective.

    Args:
        axes: of the mesh.
        is_ahead: whether the collectives start while others run.
    """
    costs = [axes.cost(axis) for axis in range(len(axes.names))]
    if is_ahead:
        costs = [Cost(start=1.0, byte=cost.byte) for cost in costs]
    elif not axes.costs:
        costs = [Cost(start=START) for _ in costs]
    else:
        costs = [Cost(x.start if x.wait is None else x.wait, x.byte) for x in costs]
    return attrs.evolve(axes, costs=tuple(costs))


def with_hardware_links(axes: MeshAxes, hardware: Hardware = H100) -> MeshAxes:
    """Return the axes with the link costs of some hardware, unless the mesh has its own."""
    if axes.costs:
        return axes
    links = hardware.links(axes)
    costs = [Cost(links[name].latency * SENT, SENT / links[name].bandwidth) for name in axes.names]
    return attrs.evolve(axes, costs=tuple(costs))


def with_links(axes: MeshAxes) -> MeshAxes:
    """Return the axes with link costs for greedy propagation, where a start counts as one byte."""
    if axes.costs:
        return axes
    costs = [Cost(1.0, cost.byte, cost.start) for cost in with_hardware_links(axes).costs]
    return attrs.evolve(axes, costs=tuple(costs))


def parameters(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Return the inputs whose gradients a graph computes, and their rearrangements."""
    found = {
        args_of(node)[1]
        for node in graph.nodes
        if node.op == "call_function" and node.target is ALIGN
    }
    for node in graph.nodes:
        if rules.row_of(node.target).rearranges and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def parameter_slots(chosen: plan.Plan, graph: torch.fx.Graph) -> set[int]:
    """Return the numbers of the slots that hold parameters."""
    nodes = parameters(graph)
    holders = graph.find_nodes(op="placeholder")
    pairs = zip(holders, chosen.ins, strict=True)
    found = {slot.number for node, slot in pairs if node in nodes}
    for step in chosen.steps:
        is_made = isinstance(step, plan.Apply) and step.node in nodes
        stays = is_made or isinstance(step, plan.Redistribute)
        if stays and found.issuperset(slot.number for slot in step.read):
            found.update(slot.number for slot in step.made)
    return found
