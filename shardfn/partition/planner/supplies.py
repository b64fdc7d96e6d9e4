"""The values of an integer program: where each may be made, who reads it where, and the moves
between the two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import attrs
import torch

from ...types import Marks, MeshAxes
from ..redistribute import route
from .integer_program import IntegerProgram
from .observed import Key

IMPOSSIBLE = float("inf")

# Variables of which one must be 1 for something to hold. None: it always holds.
OneOf = tuple[int, ...] | None


@attrs.define(eq=False)
class Supply:
    """A value: where it is made, and who reads it where.

    Args:
        fake: the value.
        axes: up to the one that is planned, with the costs of sending this value.
        share: of the value that a rank has by the axes after that one.
    """

    fake: torch.Tensor
    axes: MeshAxes
    share: float
    made: dict[Marks, list[int] | None] = attrs.field(factory=dict)
    # by placements and phase, the variables of each reader
    reads: dict[tuple[Marks, str], list[OneOf]] = attrs.field(factory=dict)
    # the placements from which its only reader can go on, so that no move starts there
    passes: Collection[Marks] = ()
    times: int = 1  # how many values are made and read like this one
    # by placements and phase, the first and the last node that reads it
    spans: dict[tuple[Marks, str], tuple[int, int]] = attrs.field(factory=dict)

    def made_at(self, marks: Marks) -> OneOf:
        """The variables by which it is made at a placement."""
        variables = self.made.get(marks, [])
        return None if variables is None else tuple(variables)

    def description(self) -> Any:
        """Equal for values that are made and read alike."""
        made = tuple((marks, self.made_at(marks)) for marks in self.made)
        reads = frozenset(
            (at, frozenset(groups)) for at, groups in self.reads.items()
        )
        return (
            tuple(self.fake.shape),
            self.fake.dtype,
            self.axes.costs,
            made,
            reads,
        )

    def price(self, source: Marks, target: Marks) -> float:
        """The price of the cheapest moves between two placements."""
        shape = tuple(self.fake.shape)
        itemsize = self.fake.element_size()
        found = route(shape, itemsize, source, target, self.axes)
        return IMPOSSIBLE if found is None else found[0] * self.share * self.times


class Moved(NamedTuple):
    """A move of values that move alike: its variable, where to, and in which phase."""

    variable: int
    supplies: Sequence[Supply]
    target: Marks
    phase: str


class Supplies:
    """All values of an integer program.

    Args:
        program: takes the variables and constraints of the moves.
    """

    def __init__(self, program: IntegerProgram) -> None:
        self.program = program
        self.found: dict[Key, Supply] = {}
        self.moved: list[Moved] = []

    def of(self, key: Key) -> Supply | None:
        """A value. None for one that is made where it is read."""
        return self.found.get(key)

    def connect(self) -> None:
        """Add the moves of every value. Values that are made and read alike move alike."""
        equal: dict[Any, list[Supply]] = defaultdict(list)
        for supply in self.found.values():
            equal[supply.description()].append(supply)
        for first, *others in equal.values():
            first.times += len(others)
            self.connect_one(first, [first, *others])

    def connect_one(self, supply: Supply, alike: Sequence[Supply]) -> None:
        """Add the moves of a value, each for all of its readers in a phase."""
        readers: dict[Any, dict[Marks, list[OneOf]]] = defaultdict(dict)
        for (marks, phase), groups in supply.reads.items():
            if supply.made_at(marks) is not None:
                readers[phase, marks[:-1]][marks] = groups
        for (phase, before), wanted in readers.items():
            replicated = (*before, "R")
            gathered = self.moves(supply, replicated)
            self.note(gathered, alike, replicated, phase)
            for marks, groups in wanted.items():
                available = [*(supply.made_at(marks) or ())]
                if marks == replicated:
                    available += gathered
                else:
                    moves = self.moves(supply, marks, but=replicated)
                    moves += self.sliced(supply, marks, replicated, gathered)
                    self.note(moves, alike, marks, phase)
                    available += moves
                for group in dict.fromkeys(groups):
                    self.satisfy(group, available)

    def note(
        self,
        moves: Sequence[int],
        alike: Sequence[Supply],
        target: Marks,
        phase: str,
    ) -> None:
        """Note the moves of some values to a placement."""
        self.moved += [Moved(move, alike, target, phase) for move in moves]

    def satisfy(self, group: OneOf, available: list[int]) -> None:
        """A reader finds the placement that it needs made, or moved to."""
        if group is None:
            self.program.at_most([], available, -1.0)
        else:
            self.program.at_most(group, available, 0.0)

    def moves(
        self, supply: Supply, target: Marks, but: Marks | None = None
    ) -> list[int]:
        """The variables of the moves to a placement, from each other at which the value is made."""
        found = []
        for source in supply.made:
            stays = source in (target, but) or source in supply.passes
            price = IMPOSSIBLE if stays else supply.price(source, target)
            if price < IMPOSSIBLE:
                move = self.program.variable(price)
                self.starts(move, supply.made_at(source), ())
                found.append(move)
        return found

    def sliced(
        self, supply: Supply, target: Marks, replicated: Marks, gathered: list[int]
    ) -> list[int]:
        """The variable of the slice of a replicated value, made so or gathered."""
        price = supply.price(replicated, target)
        if price == IMPOSSIBLE:
            return []
        move = self.program.variable(price)
        self.starts(move, supply.made_at(replicated), gathered)
        return [move]

    def starts(self, move: int, made: OneOf, moved: Collection[int]) -> None:
        """A move starts where the value is made, or where it was moved to."""
        if made is not None:
            self.program.at_most([move], [*made, *moved], 0.0)
