"""The choice of placements on one mesh axis as an integer program.

One variable says whether an op takes a strategy, one whether a value is moved from a placement to
another. An op takes exactly one strategy; a placement that it needs is one at which the value was
made, or one to which it was moved; a move starts at a placement at which the value was made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...types import Marks, MeshAxes
from ..propagation.choose import Placed
from . import work
from .alike import alike
from .integer_program import IntegerProgram
from .observed import Key, Observed
from .starts import timed
from .strategies import fitting, on_axis, share
from .supplies import OneOf, Supplies, Supply

Decided = Mapping[torch.fx.Node, Placed]  # the placements of ops on the first axes


class Strategy(NamedTuple):
    """One strategy of an op, and the variable that says whether it is taken."""

    variable: int
    placed: Placed  # on the axes up to this one


class AxisProblem:
    """The integer program of one axis.

    Args:
        observed: the walk that chose one op at a time.
        axis: the mesh axis.
        before: the placements on earlier axes that are decided. Other ops stay as they were.
    """

    def __init__(self, observed: Observed, axis: int, before: Decided) -> None:
        self.observed, self.axis, self.before = observed, axis, before
        self.axes = observed.walk.axes
        self.program = IntegerProgram()
        self.supplies = Supplies(self.program)
        self.strategies: dict[torch.fx.Node, list[Strategy]] = {}
        self.kinds = alike(observed, self.placed_before)
        self.tied: dict[Any, list[int]] = {}  # the variables of ops that are alike
        for node in observed.nodes:
            if node not in before or not self.add(node):
                self.keep(node)
        for key, marks in observed.leaving:
            self.read(key, marks, "backward")
        self.supplies.connect()

    def solve(self) -> Decided | None:
        """The placements of each op, on the axes up to this one; None if time was up."""
        values = self.program.solve()
        if values is None:
            return None
        return {
            node: next(s.placed for s in strategies if values[s.variable])
            for node, strategies in self.strategies.items()
        }

    def keep(self, node: torch.fx.Node) -> None:
        """Add a node whose placements stay as they were."""
        for key, marks in self.observed.needs(node):
            self.read(key, marks, _phase(node))
        for key, value in self.observed.results(node):
            if value.slots:
                self.fixed(key, value.fake, next(iter(value.slots)))

    def add(self, node: torch.fx.Node) -> bool:
        """Add an op whose strategy is free. Returns whether it has one."""
        chosen = self.observed.chosen[node]
        keys = self.observed.inputs(node)
        held = [self.held(key) for key in keys]
        found = fitting(self.observed.walk, node, chosen, self.before[node], held)
        if not found:
            return False
        variables = self.variables(node, found)
        self.strategies[node] = list(map(Strategy, variables, found))
        self.add_costs(node, self.strategies[node])
        self.add_reads(node, keys, self.strategies[node])
        self.add_results(node, self.strategies[node])
        return True

    def held(self, key: Key) -> set[Any]:
        """The placements on this axis at which a value may be made."""
        supply = self.supplies.found.get(key)
        return {marks[-1] for marks in supply.made} if supply else set()

    def variables(self, node: torch.fx.Node, found: list[Placed]) -> list[int]:
        """The variables of an op's strategies. Ops that are alike share them."""
        rows = tuple((tuple(placed.ins), tuple(placed.outs)) for placed in found)
        kind = (self.kinds[node], rows)
        if kind not in self.tied:
            made = self.tied[kind] = [self.program.variable(0.0) for _ in rows]
            self.program.one_of(made)
        return self.tied[kind]

    def placed_before(self, node: torch.fx.Node) -> Hashable:
        """The placements of a node on earlier axes, and all of them if they stay."""
        if node in self.before:
            placed = self.before[node]
            return tuple(placed.ins), tuple(placed.outs)
        results = self.observed.results(node)
        return tuple(next(iter(value.slots), None) for _, value in results)

    def add_costs(self, node: torch.fx.Node, strategies: list[Strategy]) -> None:
        """Each strategy costs what the busiest rank computes."""
        walk = self.observed.walk
        call, _, usual = self.observed.chosen[node]
        alone = work.in_bytes(node)
        for axis in range(len(self.axes.sizes)):
            if axis != self.axis:
                placed = self.before[node] if axis < self.axis else usual
                alone *= share(walk, call, placed, axis)
        for variable, placed in strategies:
            # among equals the choice of the walk
            same = on_axis(placed, self.axis) == on_axis(usual, self.axis)
            cost = alone * share(walk, call, placed, self.axis)
            self.program.costs[variable] += cost + (0.0 if same else 1.0)

    def add_reads(
        self, node: torch.fx.Node, keys: Sequence[Key], strategies: list[Strategy]
    ) -> None:
        """Each strategy reads each input at one placement."""
        for position, key in enumerate(keys):
            readers: dict[Marks, list[int]] = defaultdict(list)
            for variable, placed in strategies:
                readers[placed.ins[position]].append(variable)
            for marks, variables in readers.items():
                self.read(key, marks, _phase(node), tuple(variables))
        if len(keys) == 1 and self.is_moved_after(node, keys[0]):
            passes = {placed.ins[0] for _, placed in strategies}
            supply = self.supplies.found[keys[0]]
            supply.passes = {marks for marks in passes if marks[-1] != "R"}

    def is_moved_after(self, node: torch.fx.Node, key: Key) -> bool:
        """Whether the input of an op may as well be moved after the op: nothing else reads it, and
        the result is not larger.
        """
        source, _ = key
        is_shared = key not in self.supplies.found or len(source.users) > 1
        if is_shared or not self.observed.is_large:
            return False
        return work.nbytes(node.meta["val"]) <= work.nbytes(source.meta["val"])

    def add_results(self, node: torch.fx.Node, strategies: list[Strategy]) -> None:
        """Each strategy makes each result at one placement."""
        results = self.observed.results(node)
        for position, (key, value) in enumerate(results):
            made: dict[Marks, list[int] | None] = {}
            for variable, placed in strategies:
                at = made.setdefault(placed.outs[position], [])
                assert at is not None
                at.append(variable)
            usual = next(iter(value.slots), ())
            self.supply(key, value.fake, usual).made = made
        for key, fake, marks in self.observed.aligned(node):
            self.read(results[0][0], marks, _phase(node))
            self.fixed(key, fake, marks)

    def fixed(self, key: Key, fake: torch.Tensor, marks: Marks) -> None:
        """A value that is made at one placement."""
        self.supply(key, fake, marks).made = {marks[: self.axis + 1]: None}

    def supply(self, key: Key, fake: torch.Tensor, usual: Marks) -> Supply:
        """A new value, which the walk had at these placements."""
        axes = timed(self.axes, is_ahead=key in self.observed.ahead)
        end = self.axis + 1
        upto = MeshAxes(axes.names[:end], axes.sizes[:end], axes.costs[:end])
        share = 1.0
        for mark, n in zip(usual[end:], self.axes.sizes[end:], strict=False):
            share /= 1 if isinstance(mark, str) else n
        made = self.supplies.found[key] = Supply(fake, upto, share)
        return made

    def read(
        self, key: Key, marks: Marks, phase: str, variables: OneOf = None
    ) -> None:
        """Add a reader of a value. A value that is made where it is read needs none."""
        if key in self.supplies.found:
            at = phase if self.observed.is_early(key) else ""
            reads = self.supplies.found[key].reads
            reads.setdefault((marks[: self.axis + 1], at), []).append(variables)


def _phase(node: torch.fx.Node) -> str:
    return node.meta.get("phase", "forward")
