"""One walk over a Program as the planner reads it: its values, its steps, and the ops whose
strategies are free to differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from operator import getitem

import torch
from torch.fx import Node

from ...ops.nodes import args_of
from ...ops.placement import ALIGN, REDISTRIBUTE
from ...types import MeshPlacements, Program
from .. import plan
from ..propagation.partial import partial_means
from ..propagation.values import Value
from ..propagation.walk import Walk
from ..rule_api.strategy import arguments
from .inline_loops import InlinedProgram
from .start_costs import parameters

# A value: the node that makes it, and the position of the tensor in its result. A sum of gradients
# has two: before it is placed as its parameter, and after.
Key = tuple[Node, int]
SUM = -1

FEW = 300  # programs up to this number of ops are planned op by op


class ObservedWalk:
    """A finished walk as the planner reads it: values, steps, and the ops that have a choice.

    Args:
        walk: after it walked the Program.
        program: the Program.
        chosen: the plan that the walk made.
        flat: the program as one without scans, if it is that.
    """

    def __init__(
        self, walk: Walk, program: Program, chosen: plan.Plan, flat: InlinedProgram | None = None
    ) -> None:
        self.walk = walk
        self.flat = flat or InlinedProgram(program)
        self.chosen = walk.chosen
        graph = program.graph.graph
        self.nodes = [node for node in graph.nodes if self.is_planned(node)]
        self.steps: dict[Node, list[plan.Step]] = defaultdict(list)
        for step in walk.steps:
            self.steps[walk.within.get(step.node, step.node)].append(step)
        self.values: dict[Key, Value] = {}
        self.owners: dict[int, Key] = {}  # of slots, by number
        for node in self.nodes:
            for key, value in self.results(node):
                self.values[key] = value
                self.own(key, value)
        # values whose collectives start while others run
        self.ahead = {self.key(x) for x in parameters(graph)} | self.gradients()
        (output,) = graph.find_nodes(op="output")
        # results keep their placements
        self.returned: list[Node] = list(args_of(output)[0])
        self.leaving: list[tuple[Key, MeshPlacements]] = [
            (self.key(x), partial_means.as_sums(slot.placements))
            for x, slot in zip(self.returned, chosen.outs, strict=True)
        ]

    def own(self, key: Key, value: Value) -> None:
        """Note which value the slots belong to; the first owner counts."""
        for slot, _ in value.slots.values():
            self.owners.setdefault(slot.number, key)

    def is_planned(self, node: Node) -> bool:
        """Return whether a node makes values of its own, so that the planner places it."""
        is_merged = node in self.walk.merged and node.target is ALIGN
        makes = node.op in ("placeholder", "call_function")
        is_left = is_merged or node in self.walk.left
        return makes and node.target is not getitem and not is_left

    def gradients(self) -> set[Key]:
        """Return the gradients before they are placed like their parameters."""
        sums = {(node, SUM) for node in self.nodes if self.is_sum(node)}
        aligned = [node for node in self.nodes if node.target is ALIGN]
        return sums | {self.key(args_of(node)[0]) for node in aligned}

    @property
    def is_large(self) -> bool:
        """Return whether the program is so large that equal ops share one decision."""
        return len(self.nodes) > FEW

    def key(self, node: Node) -> Key:
        """Return the key of a node's value; a getitem shares that of the tuple's element."""
        if node.target is getitem:
            source, position = args_of(node)
            return source, position
        return node, 0

    def inputs(self, node: Node) -> list[Key]:
        """List the values that an op reads, one for each tensor argument."""
        read = arguments(node)
        if self.is_sum(node):
            return [self.unplaced(term) for term in read]
        return [self.key(x) for x in read]

    def read_by(self, node: Node) -> list[Key]:
        """List the values that any node reads."""
        if node in self.chosen:
            return self.inputs(node)
        return [self.key(x) for x in self.terms(node)]

    def terms(self, node: Node) -> list[Node]:
        """List the nodes that a node reads, with the terms of sums that were deferred to it."""
        return self.walk.summed.get(node, node.all_input_nodes)

    def is_sum(self, node: Node) -> bool:
        """Return whether a node adds gradients before they are placed like their parameter."""
        return node in self.chosen and node in self.walk.unplaced

    def unplaced(self, term: Node) -> Key:
        """Return the key of a gradient before it is placed like its parameter."""
        if self.is_sum(term):
            return term, SUM
        return self.key(args_of(term)[0])

    def results(self, node: Node) -> list[tuple[Key, Value]]:
        """List the values that a node makes."""
        if self.is_sum(node):
            return [((node, SUM), self.walk.unplaced[node].value)]
        made = self.walk.values.get(node)  # none of an op that only checks
        several = made if isinstance(made, list) else [made]
        return [((node, i), value) for i, value in enumerate(several) if isinstance(value, Value)]

    def aligned(self, node: Node) -> list[tuple[Key, torch.Tensor, MeshPlacements]]:
        """List the gradient sum that a node makes, after it is placed like its parameter."""
        if not self.is_sum(node) or node in self.walk.merged:
            return []
        value = self.walk.values[node]
        return [((node, 0), value.fake, next(iter(value.slots)))]

    def needs(self, node: Node) -> Iterator[tuple[Key, MeshPlacements]]:
        """Yield the placements at which a node with fixed placements reads its inputs."""
        if node.target in (ALIGN, REDISTRIBUTE):
            yield (self.key(args_of(node)[0]), next(iter(self.walk.values[node].slots)))
            return
        mine = {self.key(x) for x in self.terms(node)}
        slots = [slot for step in self.steps[node] for slot in _needed(step)]
        slots += [slot for _, v in self.results(node) for slot, _ in v.slots.values()]
        for slot in slots:
            owner = self.owners.get(slot.number)
            if owner in mine:
                assert owner is not None
                yield owner, slot.placements

    def is_early(self, key: Key) -> bool:
        """Return whether a value is an input of the program, which each phase gathers for
        itself.
        """
        return key in self.values and self.values[key].early


def _needed(step: plan.Step) -> tuple[plan.Slot, ...]:
    """Return the slots that a step reads, or the target of a redistribution."""
    if isinstance(step, plan.Redistribute):
        return (step.target,)
    return step.read
