"""The choice of placements on one mesh axis as an integer program.

One variable says whether an op takes a strategy, one whether a value is moved from a placement to
another. An op takes exactly one strategy; a placement that it needs is one at which the value was
made, or one to which it was moved; a move starts at a placement at which the value was made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch.fx import Node

from ...types import Mark, Marks, MeshAxes
from .. import layout
from ..propagation.values import Placed
from . import work
from .alike import alike
from .integer_program import IntegerProgram
from .observed import Key, Observed
from .starts import timed
from .strategies import fitting, on_axis, share
from .supplies import OneOf, Supplies, Supply

# Ways of values between two placements. With more of them a solver takes minutes, so strided shards
# are left out: views of windows of an image have dozens.
MOST_WAYS = 150_000
Decided = Mapping[Node, Placed]  # the placements of ops on the first axes


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
        self.observed = observed
        self.walk = observed.walk
        self.axes = observed.walk.axes
        self.axis = axis
        self.before = before
        self.kinds = alike(observed, self.placed_before)
        self.is_narrow = False  # without strided shards that the walk did not choose
        self.state()
        if self.is_too_large:
            self.is_narrow = True
            self.state()
        if not self.is_too_large:
            self.supplies.connect()

    def state(self) -> None:
        """State the problem, but for the moves of values."""
        self.program = IntegerProgram()
        self.supplies = Supplies(self.program)
        self.strategies: dict[Node, list[Strategy]] = {}
        # the variables of ops that are alike
        self.tied: dict[Hashable, list[int]] = {}
        self.position = 0  # of the node that is added
        for position, node in enumerate(self.observed.nodes):
            self.position = position
            self.add(node)
        self.read_results()
        self.tie_carries()
        self.is_too_large = self.supplies.ways() > MOST_WAYS

    def tie_carries(self) -> None:
        """A carry enters each step as it leaves the one before. Carries of one shape are placed
        alike.
        """
        known: dict[tuple[int, ...], dict[Marks, list[int]]] = {}
        for node in self.observed.flat.edges:
            here: dict[Marks, list[int]] = defaultdict(list)
            for variable, placed in self.strategies.get(node, ()):
                (marks,) = placed.outs
                here[marks].append(variable)
            if here:
                shape = tuple(node.meta["val"].shape)
                first = known.setdefault(shape, here)
                self.tie(first, here)

    def tie(self, first: Mapping[Marks, list[int]], here: Mapping[Marks, list[int]]) -> None:
        """Two ops give the same placement."""
        for marks in dict.fromkeys((*first, *here)):
            others = first.get(marks, ())
            mine = here.get(marks, ())
            self.program.at_most(mine, others, 0.0)
            self.program.at_most(others, mine, 0.0)

    def read_results(self) -> None:
        """The results leave at the placements that the walk gave them."""
        for key, marks in self.observed.leaving:
            self.read(key, "backward", {marks: None})

    def solve(self) -> Decided | None:
        """The placements of each op, on the axes up to this one; None if time was up, or if the
        program is too large.
        """
        values = None if self.is_too_large else self.program.solve()
        if values is None:
            return None
        decided = {}
        for node, strategies in self.strategies.items():
            for variable, placed in strategies:
                if values[variable]:
                    decided[node] = placed
        return decided

    def add(self, node: Node) -> None:
        """Add a node: an op whose strategy is free, or one that stays as it was."""
        found = self.fitting(node)
        if found:
            self.add_op(node, found)
        else:
            self.keep(node)

    def fitting(self, node: Node) -> list[Placed]:
        """The placements that an op may take. None for a node that stays as it was."""
        if node not in self.before:
            return []
        chosen = self.observed.chosen[node]
        keys = self.observed.inputs(node)
        held = [self.held(key) for key in keys]
        found = fitting(self.walk, node, chosen, self.before[node], held)
        if not self.is_narrow:
            return found
        usual = on_axis(chosen.placed, self.axis)
        known = {mark for marks in usual for mark in marks}
        return [x for x in found if known.issuperset(_strided(x, self.axis))]

    def held(self, key: Key) -> set[Mark]:
        """The placements on this axis at which a value may be made."""
        supply = self.supplies.of(key)
        if supply is None:
            return set()
        return {marks[-1] for marks in supply.made}

    def keep(self, node: Node) -> None:
        """Add a node whose placements stay as they were."""
        phase = _phase(node)
        for key, marks in self.observed.needs(node):
            self.read(key, phase, {marks: None})
        for key, value in self.observed.results(node):
            if value.slots:
                marks = next(iter(value.slots))
                self.add_fixed(key, value.fake, marks)

    def add_op(self, node: Node, found: list[Placed]) -> None:
        """Add an op that may be placed so."""
        variables = self.variables(node, found)
        strategies = list(map(Strategy, variables, found))
        self.strategies[node] = strategies
        self.add_costs(node, strategies)
        self.add_reads(node, strategies)
        self.add_results(node, strategies)

    def variables(self, node: Node, found: list[Placed]) -> list[int]:
        """The variables of an op's strategies. Ops that are alike share them."""
        rows = tuple(map(_hashable, found))
        kind = (self.kinds[node], rows)
        if kind not in self.tied:
            made = [self.program.variable(0.0) for _ in rows]
            self.program.one_of(made)
            self.tied[kind] = made
        return self.tied[kind]

    def placed_before(self, node: Node) -> Hashable:
        """The placements of a node on earlier axes, and all of them if they stay."""
        if node in self.before:
            return _hashable(self.before[node])
        results = self.observed.results(node)
        return tuple(next(iter(value.slots), None) for _, value in results)

    def add_costs(self, node: Node, strategies: list[Strategy]) -> None:
        """Each strategy costs what the busiest rank computes."""
        call, _, usual = self.observed.chosen[node]
        alone = self.work(node) * self.observed.flat.computed(node)
        for axis in range(len(self.axes.sizes)):
            if axis < self.axis:
                alone *= share(self.walk, call, self.before[node], axis)
            elif axis > self.axis:
                alone *= share(self.walk, call, usual, axis)
        as_before = on_axis(usual, self.axis)
        costs = self.program.costs
        for variable, placed in strategies:
            costs[variable] += alone * share(self.walk, call, placed, self.axis)
            # among equals the choice of the walk
            if on_axis(placed, self.axis) != as_before:
                costs[variable] += 1.0

    def work(self, node: Node) -> float:
        """The time of an op on one device, in bytes that a rank sends meanwhile."""
        return work.in_bytes(node)

    def add_reads(self, node: Node, strategies: list[Strategy]) -> None:
        """Each strategy reads each input at one placement."""
        keys = self.observed.inputs(node)
        phase = _phase(node)
        for position, key in enumerate(keys):
            readers: dict[Marks, list[int]] = defaultdict(list)
            for variable, placed in strategies:
                marks = placed.ins[position]
                readers[marks].append(variable)
            groups = {marks: tuple(found) for marks, found in readers.items()}
            self.read(key, phase, groups)
        if len(keys) == 1:
            self.let_pass(node, keys[0], strategies)

    def let_pass(self, node: Node, key: Key, strategies: list[Strategy]) -> None:
        """In a large program, move the input of an op after the op, where nothing else reads it
        and the result is not larger.
        """
        supply = self.supplies.of(key)
        source, _ = key
        is_read_once = len(source.users) == 1
        if supply is None or not is_read_once or not self.observed.is_large:
            return
        before = source.meta["val"]
        after = node.meta["val"]
        if work.nbytes(after) <= work.nbytes(before):
            passes = {placed.ins[0] for _, placed in strategies}
            supply.passes = {marks for marks in passes if marks[-1] != "R"}

    def add_results(self, node: Node, strategies: list[Strategy]) -> None:
        """Each strategy makes each result at one placement."""
        results = self.observed.results(node)
        for position, (key, value) in enumerate(results):
            made: dict[Marks, list[int]] = defaultdict(list)
            for variable, placed in strategies:
                marks = placed.outs[position]
                made[marks].append(variable)
            usual = next(iter(value.slots), ())
            supply = self.supply(key, value.fake, usual)
            supply.made.update(made)
        for key, fake, marks in self.observed.aligned(node):
            unaligned, _ = results[0]
            self.align(node, unaligned, key, fake, marks)

    def align(self, node: Node, gradient: Key, key: Key, fake: torch.Tensor, marks: Marks) -> None:
        """Add a gradient that is placed as its parameter."""
        self.read(gradient, _phase(node), {marks: None})
        self.add_fixed(key, fake, marks)

    def add_fixed(self, key: Key, fake: torch.Tensor, marks: Marks) -> None:
        """Add a value that is made at one placement."""
        supply = self.supply(key, fake, marks)
        supply.made[self.here(marks)] = None

    def supply(self, key: Key, fake: torch.Tensor, usual: Marks) -> Supply:
        """Add a value, which the walk had at these placements."""
        is_ahead = key in self.observed.ahead
        axes = timed(self.axes, is_ahead=is_ahead)
        end = self.axis + 1
        upto = MeshAxes(axes.names[:end], axes.sizes[:end], axes.costs[:end])
        of_others = 1.0
        for mark, n in zip(usual[end:], axes.sizes[end:], strict=False):
            if not isinstance(mark, str):
                of_others /= n
        source, _ = key
        made = Supply(
            fake, upto, of_others, later=axes.sizes[end:], times=self.observed.flat.made(source)
        )
        self.supplies.found[key] = made
        return made

    def read(self, key: Key, phase: str, groups: Mapping[Marks, OneOf]) -> None:
        """Add a reader of a value. A value that is made where it is read needs none.

        Args:
            key: the value.
            phase: of the reader.
            groups: the placements at which it may read, with the variables of each.
        """
        supply = self.supplies.of(key)
        if supply is None:
            return
        # each phase gathers a parameter for itself
        when = phase if self.observed.is_early(key) else ""
        here = {self.here(marks): found for marks, found in groups.items()}
        supply.reads.append((when, here))
        for marks in here:
            place = (marks, when)
            first, _ = supply.spans.setdefault(place, (self.position, self.position))
            supply.spans[place] = first, self.position

    def here(self, marks: Marks) -> Marks:
        """The placements on the axes up to this one."""
        return marks[: self.axis + 1]


def _strided(placed: Placed, axis: int) -> Iterator[Mark]:
    """The strided shards of an op on one axis."""
    for marks in on_axis(placed, axis):
        yield from (mark for mark in marks if layout.outer_of(mark) > 1)


def _hashable(placed: Placed) -> Hashable:
    return tuple(placed.ins), tuple(placed.outs)


def _phase(node: Node) -> str:
    return node.meta.get("phase", "forward")
