"""The integer program of one mesh axis with free arguments and a limit of memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import NamedTuple

import attrs
import torch
from torch.fx import Node

from ...hardware import H100, Hardware
from ...ops.nodes import args_of
from ...types import PENDING, Marks
from ..planner import work
from ..planner.axis_problem import AxisProblem, Decided
from ..planner.observed import Key, Observed
from ..planner.share import share_of
from ..planner.supplies import OneOf, Supply
from ..propagation.walk import ALIGN, op_name
from . import fused
from .moments import Moments
from .unknowns import Unknowns

# by argument, or by the position of a result
Inputs = dict[Node, Marks]
Results = dict[int, Marks]
Options = dict[Marks, int]  # the variable of each placement


@attrs.frozen
class Axes:
    """The placements on the first axes: of ops, of arguments and of results."""

    ops: Decided
    inputs: Inputs
    results: Results


class Held(NamedTuple):
    """Bytes that a rank holds from one node to another if a variable is 1, or always."""

    variable: int | None
    nbytes: float
    first: int
    last: int


class AutoProblem(AxisProblem):
    """The integer program of one axis.

    Args:
        observed: the walk that chose one op at a time.
        axis: the mesh axis.
        before: what is decided on earlier axes.
        unknowns: the free arguments.
        moments: at which memory is limited.
        limit: bytes of a rank. None: the least possible is looked for.
        hardware: that computes.
    """

    def __init__(
        self,
        observed: Observed,
        axis: int,
        before: Axes,
        unknowns: Unknowns,
        moments: Moments,
        limit: float | None,
        hardware: Hardware = H100,
    ) -> None:
        self.hardware = hardware
        self.unknowns = unknowns
        self.decided = before
        super().__init__(observed, axis, before.ops)
        self.moments = moments
        self.add_memory(limit)

    def state(self) -> None:
        self.options: dict[Hashable, Options] = {}
        self.outs: dict[int, Options] = {}
        super().state()

    def choose(self) -> Axes | None:
        """The placements on the axes up to this one; None if none is found in time, or if the
        program is too large.
        """
        values = None if self.is_too_large else self.program.solve()
        if values is None:
            return None
        ops = {
            node: placed
            for node, strategies in self.strategies.items()
            for variable, placed in strategies
            if values[variable]
        }
        inputs = {
            node: marks
            for node in self.unknowns.free()
            for marks, variable in self.options_of(node).items()
            if values[variable]
        }
        results = {
            position: marks
            for position, options in self.outs.items()
            for marks, variable in options.items()
            if values[variable]
        }
        return Axes(ops, inputs, results)

    def work(self, node: Node) -> float:
        return fused.in_bytes(node, self.hardware)

    def add(self, node: Node) -> None:
        options = self.options_of(node) if node.op == "placeholder" else {}
        if options:
            ((key, value),) = self.observed.results(node)
            usual = next(iter(value.slots))
            supply = self.supply(key, value.fake, usual)
            supply.made.update((marks, [v]) for marks, v in options.items())
        elif op_name(node) == ALIGN:
            gradient = self.observed.key(args_of(node)[0])
            ((key, value),) = self.observed.results(node)
            marks = next(iter(value.slots))
            self.align(node, gradient, key, value.fake, marks)
        else:
            super().add(node)

    def options_of(self, node: Node) -> Options:
        """The placements of an argument, with their variables. Empty if it is not free."""
        leader = self.unknowns.leader(node)
        if leader is None or node.op != "placeholder":
            return {}
        fixed = self.unknowns.fixed(leader)
        before = self.before_of(node) if fixed is None else fixed[: self.axis]
        kind = self.kinds[leader], before, fixed
        if kind not in self.options:
            candidates = self.unknowns.candidates(leader, before)
            made = {marks: self.program.variable(0.0) for marks in candidates}
            self.program.one_of(made.values())
            self.options[kind] = made
        return self.options[kind]

    def before_of(self, node: Node) -> Marks:
        """The placements of an argument on earlier axes."""
        return self.decided.inputs.get(node, ())

    def placed_before(self, node: Node) -> Hashable:
        if node.op == "placeholder" and self.unknowns.leader(node) is not None:
            return self.before_of(node)
        return super().placed_before(node)

    def align(self, node: Node, gradient: Key, key: Key, fake: torch.Tensor, marks: Marks) -> None:
        """A gradient is read at the placement of its parameter, and made at it."""
        parameter = self.parameter(node)
        options = self.options_of(parameter)
        if not options or parameter.meta["val"].shape != fake.shape:
            super().align(node, gradient, key, fake, marks)
            return
        supply = self.supply(key, fake, marks)
        self.read(gradient, "backward", _each_alone(options))
        for placed, variable in options.items():
            supply.made[placed] = [variable]

    def parameter(self, node: Node) -> Node:
        """The parameter of a gradient, or of a sum of gradients."""
        known = self.walk.unaligned.get(node)
        return known.like if known is not None else args_of(node)[1]

    def read_results(self) -> None:
        """A result that follows a parameter leaves as that one does, others where they are."""
        self.position = len(self.observed.nodes)
        (output,) = self.walk_output()
        leaving = args_of(output)[0]
        for position, (key, marks) in enumerate(self.observed.leaving):
            node = leaving[position]
            if self.unknowns.leaving[position] is not None:
                self.read(key, "backward", {marks: None})
                continue
            leader = self.unknowns.followers.leader(node)
            options = self.options_of(leader) if leader is not None else {}
            supply = self.supplies.of(key)
            if not options and supply is not None:
                options = self.out_options(position, supply)
            if options:
                self.read(key, "backward", _each_alone(options))

    def walk_output(self) -> list[Node]:
        """The node of the results."""
        first: Node = self.observed.nodes[0]
        return first.graph.find_nodes(op="output")

    def out_options(self, position: int, supply: Supply) -> Options:
        """The placements at which a result may leave: where it is made, and replicated."""
        before = self.decided.results.get(position, ())
        found: Options = {}
        for marks in [(*before, "R"), *supply.made]:
            is_plain = isinstance(marks[-1], (str, int)) and marks[-1] not in PENDING
            if is_plain and marks[:-1] == before and marks not in found:
                found[marks] = self.program.variable(0.0)
        self.program.one_of(found.values())
        self.outs[position] = found
        return found

    def add_memory(self, limit: float | None) -> None:
        """At each moment, the bytes alive are at most the limit, or as few as possible."""
        least = None if limit is not None else self.only_cost()
        unit = limit or self.bytes_of_arguments()
        if unit == float("inf"):
            return
        rows = [*self.held_values(), *self.held_moves()]
        for moment in self.moments.chosen:
            terms: dict[int, float] = defaultdict(float)
            room = 0.0 if limit is None else 1.0
            for variable, nbytes, first, last in rows:
                if not first <= moment <= last:
                    continue
                if variable is None:
                    room -= nbytes / unit
                else:
                    terms[variable] += nbytes / unit
            if least is not None:
                terms[least] = -1.0
            self.program.between(float("-inf"), terms.items(), room)

    def only_cost(self) -> int:
        """A variable that is the only one with a cost."""
        costs = self.program.costs
        costs[:] = [0.0] * len(costs)
        return self.program.size(1.0)

    def bytes_of_arguments(self) -> float:
        """The bytes of all arguments."""
        total = sum(work.nbytes(x.meta["val"]) for x in self.unknowns.holders)
        return float(max(total, 1))

    def held_values(self) -> Iterator[Held]:
        """The memory of values where they are made."""
        for (node, _), supply in self.supplies.found.items():
            if not self.moments.is_owner(node):
                continue
            first, last = self.moments.span(node)
            for marks, variables in supply.made.items():
                nbytes = self.local_bytes(supply, marks)
                for variable in variables or (None,):
                    yield Held(variable, nbytes, first, last)

    def held_moves(self) -> Iterator[Held]:
        """The memory of values where they were moved to, between their readers there."""
        for move in self.supplies.moved:
            nbytes = self.local_bytes(move.supplies[0], move.target)
            for supply in move.supplies:
                for first, last in _spans(supply, move.target, move.phase):
                    yield Held(move.variable, nbytes, first, last)

    def local_bytes(self, supply: Supply, marks: Marks) -> float:
        """The bytes of a value on one rank."""
        nbytes = float(work.nbytes(supply.fake))
        for axis in range(len(marks)):
            nbytes *= share_of([(supply.fake, marks)], self.axes.sizes, axis)
        return nbytes


def _each_alone(options: Options) -> dict[Marks, OneOf]:
    """The placements at which a result may be read, each by one variable."""
    return {marks: (variable,) for marks, variable in options.items()}


def _spans(supply: Supply, target: Marks, phase: str) -> list[tuple[int, int]]:
    """The first and the last reader of a value at a placement; of a value that is only gathered
    to be sliced, those of its slices.
    """
    own = supply.spans.get((target, phase))
    every = [span for (_, when), span in supply.spans.items() if when == phase]
    if own is not None or not every:
        return [] if own is None else [own]
    return [(min(first for first, _ in every), max(last for _, last in every))]
