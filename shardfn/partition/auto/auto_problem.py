"""The integer program of one mesh axis with free arguments and a limit of memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

import attrs
import torch

from ...ops.nodes import args_of
from ...types import PENDING, Marks
from ..planner import work
from ..planner.axis_problem import AxisProblem, Decided
from ..planner.observed import Key, Observed
from ..planner.share import share_of
from ..planner.supplies import Supply
from ..propagation.walk import ALIGN, op_name
from . import fused
from .moments import Moments
from .unknowns import Unknowns

# by argument, or by the position of a result
Inputs = dict[torch.fx.Node, Marks]
Results = dict[int, Marks]
Options = dict[Marks, int]  # the variable of each placement


@attrs.frozen
class Axes:
    """What is decided on the first axes: of ops, of arguments and of results."""

    ops: Decided
    inputs: Inputs
    results: Results


class AutoProblem(AxisProblem):
    """The integer program of one axis.

    Args:
        observed: the walk that chose one op at a time.
        axis: the mesh axis.
        before: what is decided on earlier axes.
        unknowns: the free arguments.
        moments: at which memory is limited.
        limit: bytes of a rank. None: the least possible is looked for.
    """

    def __init__(
        self,
        observed: Observed,
        axis: int,
        before: Axes,
        unknowns: Unknowns,
        moments: Moments,
        limit: float | None,
    ) -> None:
        self.unknowns = unknowns
        self.decided = before
        self.options: dict[Hashable, Options] = {}
        self.outs: dict[int, Options] = {}
        super().__init__(observed, axis, before.ops)
        self.moments = moments
        self.add_memory(limit)

    def choose(self) -> Axes | None:
        """The placements on the axes up to this one; None if there is no solution in time."""
        values = self.program.solve()
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

    def work(self, node: torch.fx.Node) -> float:
        return fused.in_bytes(node)

    def add(self, node: torch.fx.Node) -> None:
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

    def options_of(self, node: torch.fx.Node) -> Options:
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

    def before_of(self, node: torch.fx.Node) -> Marks:
        """The placements of an argument on earlier axes."""
        return self.decided.inputs.get(node, ())

    def placed_before(self, node: torch.fx.Node) -> Hashable:
        if node.op == "placeholder" and self.unknowns.leader(node) is not None:
            return self.before_of(node)
        return super().placed_before(node)

    def align(
        self,
        node: torch.fx.Node,
        gradient: Key,
        key: Key,
        fake: torch.Tensor,
        marks: Marks,
    ) -> None:
        """A gradient is read at the placement of its parameter, and made at it."""
        parameter = self.parameter(node)
        options = self.options_of(parameter)
        if not options or parameter.meta["val"].shape != fake.shape:
            super().align(node, gradient, key, fake, marks)
            return
        supply = self.supply(key, fake, marks)
        for placed, variable in options.items():
            self.read(gradient, placed, "backward", (variable,))
            supply.made[placed] = [variable]

    def parameter(self, node: torch.fx.Node) -> torch.fx.Node:
        """The parameter of a gradient, or of a sum of gradients."""
        known = self.walk.unaligned.get(node)
        return known.like if known is not None else args_of(node)[1]

    def read_results(self) -> None:
        """A result that follows a parameter leaves as that one does, others where they are."""
        self.position = len(self.observed.nodes)
        (output,) = self.walk_output()
        for position, (key, marks) in enumerate(self.observed.leaving):
            node = output.args[0][position]
            if self.unknowns.leaving[position] is not None:
                self.read(key, marks, "backward")
                continue
            leader = self.unknowns.followers.leader(node)
            options = self.options_of(leader) if leader is not None else {}
            supply = self.supplies.of(key)
            if not options and supply is not None:
                options = self.out_options(position, supply)
            for placed, variable in options.items():
                self.read(key, placed, "backward", (variable,))

    def walk_output(self) -> list[torch.fx.Node]:
        """The node of the results."""
        first: torch.fx.Node = self.observed.nodes[0]
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
        """What is alive at each moment is at most the limit, or as little as possible."""
        least = None if limit is not None else self.program.size(1.0)
        if least is not None:
            costs = self.program.costs
            costs[:] = [0.0] * len(costs)
            costs[least] = 1.0
        for moment in self.moments.chosen:
            terms, constant = self.held_at(moment)
            unit = limit or self.largest(terms, constant)
            rows = [(v, nbytes / unit) for v, nbytes in terms.items()]
            if least is None:
                self.program.between(float("-inf"), rows, 1.0 - constant / unit)
            else:
                rows = [(v, nbytes / self.scale) for v, nbytes in terms.items()]
                rows.append((least, -1.0))
                self.program.between(float("-inf"), rows, -constant / self.scale)

    @property
    def scale(self) -> float:
        """The bytes of all arguments, as the unit of the least memory."""
        total = sum(work.nbytes(x.meta["val"]) for x in self.unknowns.holders)
        return float(max(total, 1))

    def largest(self, terms: dict[int, float], constant: float) -> float:
        """A unit for numbers of bytes."""
        return max(1.0, constant, *terms.values())

    def held_at(self, moment: int) -> tuple[dict[int, float], float]:
        """The bytes that each variable holds at a moment, and those that are always held."""
        terms: dict[int, float] = defaultdict(float)
        constant = 0.0
        for (node, _), supply in self.supplies.found.items():
            is_held = self.moments.is_owner(node) and self.moments.alive(node, moment)
            if not is_held:
                continue
            for marks, variables in supply.made.items():
                nbytes = self.local_bytes(supply, marks)
                if variables is None:
                    constant += nbytes
                for variable in variables or ():
                    terms[variable] += nbytes
        for move in self.supplies.moved:
            place = move.target, move.phase
            count = sum(_spans(x, place, moment) for x in move.supplies)
            if count:
                nbytes = count * self.local_bytes(move.supplies[0], move.target)
                terms[move.variable] += nbytes
        return terms, constant

    def local_bytes(self, supply: Supply, marks: Marks) -> float:
        """The bytes of a value on one rank."""
        nbytes = float(work.nbytes(supply.fake))
        for axis in range(len(marks)):
            nbytes *= share_of([(supply.fake, marks)], self.axes.sizes, axis)
        return nbytes


def _spans(supply: Supply, place: tuple[Marks, str], moment: int) -> bool:
    """Whether a value is held at a placement between its first and its last reader there."""
    _, phase = place
    own = supply.spans.get(place)
    every = [span for (_, when), span in supply.spans.items() if when == phase]
    spans = every if own is None else [own]
    return any(first <= moment <= last for first, last in spans)
