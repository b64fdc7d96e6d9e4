"""The values of an integer program: where each may be made, who reads it where, and the moves
between the two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import torch

from ...types import MeshAxes, MeshPlacements
from ..redistribute import route
from .integer_program import IntegerProgram
from .observed_walk import Key

IMPOSSIBLE = float("inf")

# Variables of which one must be 1 for something to hold. None: it always holds.
OneOf = tuple[int, ...] | None

# By placement, the variables of the strategies of one reader that read a value there.
Reads = dict[MeshPlacements, OneOf]

# The variables of the moves from one placement to another: any of them will do.
Moves = dict[tuple[MeshPlacements, MeshPlacements], list[int]]


@attrs.define(eq=False)
class Supply:
    """A value of the integer program: where it may be made, and who reads it where.

    Args:
        fake: the value.
        axes: up to the one that is planned, with the costs of sending this value.
        share: of the value that a rank has by the axes after that one.
    """

    fake: torch.Tensor
    axes: MeshAxes
    share: float
    made: dict[MeshPlacements, list[int] | None] = attrs.field(factory=dict)
    reads: list[tuple[str, Reads]] = attrs.field(factory=list)  # each with its phase
    # the placements from which its only reader can go on, so that no move starts there
    passes: Collection[MeshPlacements] = ()
    later: tuple[int, ...] = ()  # the sizes of the axes after that one
    times: int = 1  # how often it is made, with those that are made and read like it
    # by placements and phase, the first and the last node that reads it
    spans: dict[tuple[MeshPlacements, str], tuple[int, int]] = attrs.field(factory=dict)

    def made_at(self, placements: MeshPlacements) -> OneOf:
        """Return the variables by which the value is made at a placement."""
        variables = self.made.get(placements, [])
        return None if variables is None else tuple(variables)

    def description(self) -> Any:
        """Return a key that is equal for values with equal producers and readers."""
        made = tuple((placements, self.made_at(placements)) for placements in self.made)
        reads = frozenset((phase, tuple(groups.items())) for phase, groups in self.reads)
        return (tuple(self.fake.shape), self.fake.dtype, self.axes.costs, made, reads)

    def places(self) -> int:
        """Count the placements at which the value is read."""
        return len({placements for _, groups in self.reads for placements in groups})

    def spans_at(self, target: MeshPlacements, phase: str) -> list[tuple[int, int]]:
        """Return the first and last reader of the value at a placement."""
        own = self.spans.get((target, phase))
        every = [span for (_, when), span in self.spans.items() if when == phase]
        if own is not None or not every:
            return [] if own is None else [own]
        return [(min(first for first, _ in every), max(last for _, last in every))]

    def price(self, source: MeshPlacements, target: MeshPlacements) -> float:
        """Price the cheapest moves between two placements of the value."""
        shape = tuple(self.fake.shape)
        itemsize = self.fake.element_size()
        found = route(shape, itemsize, source, target, self.axes, self.later)
        return IMPOSSIBLE if found is None else found[0] * self.share * self.times


class Moved(NamedTuple):
    """A move variable, with the values that it moves, the target and the phase."""

    variable: int
    supplies: Sequence[Supply]
    target: MeshPlacements
    phase: str


class Supplies:
    """All values of an integer program, and the variables of their moves.

    Args:
        program: takes the variables and constraints of the moves.
    """

    def __init__(self, program: IntegerProgram) -> None:
        self.program = program
        self.found: dict[Key, Supply] = {}
        self.moved: list[Moved] = []

    def equal(self) -> list[list[Supply]]:
        """Group values with equal producers and readers."""
        found: dict[Any, list[Supply]] = defaultdict(list)
        for supply in self.found.values():
            found[supply.description()].append(supply)
        return list(found.values())

    def ways(self) -> int:
        """Count the (producer, reader) placement pairs of all values."""
        return sum(len(first.made) * first.places() for first, *_ in self.equal())

    def connect(self) -> None:
        """Add the moves of every value; equal values share theirs."""
        for first, *others in self.equal():
            first.times += sum(other.times for other in others)
            self.connect_one(first, [first, *others])

    def connect_one(self, supply: Supply, alike: Sequence[Supply]) -> None:
        """Add the moves of one value, shared by all readers of a phase."""
        readers: dict[Any, dict[Hashable, Reads]] = defaultdict(dict)
        for phase, groups in supply.reads:
            before = next(iter(groups))[:-1]
            # equal readers read what is moved for one of them
            readers[phase, before].setdefault(tuple(groups.items()), groups)
        for (phase, before), several in readers.items():
            targets = dict.fromkeys(m for groups in several.values() for m in groups)
            moves = self.moves_to(supply, alike, targets, (*before, "R"), phase)
            for groups in several.values():
                self.satisfy(supply, groups, moves)

    def moves_to(
        self,
        supply: Supply,
        alike: Sequence[Supply],
        targets: Iterable[MeshPlacements],
        replicated: MeshPlacements,
        phase: str,
    ) -> Moves:
        """Add variables for the moves of a value to some placements."""
        gathered = self.moves(supply, replicated)
        self.note(gathered.values(), alike, replicated, phase)
        found: Moves = {(at, replicated): [v] for at, v in gathered.items()}
        for placements in targets:
            if placements != replicated:
                direct = self.moves(supply, placements, but=replicated)
                sliced = self.sliced(supply, placements, replicated, gathered)
                for moves in (direct, sliced):
                    self.note(moves.values(), alike, placements, phase)
                    for source, variable in moves.items():
                        found.setdefault((source, placements), []).append(variable)
        return found

    def note(
        self, moves: Iterable[int], alike: Sequence[Supply], target: MeshPlacements, phase: str
    ) -> None:
        """Note the moves of some values to a placement, for memory."""
        self.moved += [Moved(move, alike, target, phase) for move in moves]

    def satisfy(self, supply: Supply, groups: Mapping[MeshPlacements, OneOf], moves: Moves) -> None:
        """Require that a reader finds the value at its placement: made there, or moved there."""
        leaving: dict[MeshPlacements, list[int]] = defaultdict(list)
        for target, group in groups.items():
            arriving = []
            for source in supply.made:
                ways = moves.get((source, target), [])
                if source != target and not ways:
                    continue
                way = self.program.size(0.0)
                if source != target:
                    self.program.at_most([way], ways, 0.0)
                leaving[source].append(way)
                arriving.append(way)
            needed, at_least = ((), -1.0) if group is None else (group, 0.0)
            self.program.at_most(needed, arriving, at_least)
        for source, ways in leaving.items():
            made = supply.made_at(source)
            available, most = ((), 1.0) if made is None else (made, 0.0)
            self.program.at_most(ways, available, most)

    def moves(
        self, supply: Supply, target: MeshPlacements, but: MeshPlacements | None = None
    ) -> dict[MeshPlacements, int]:
        """Add a variable for the direct move to a placement from each placement where the value
        is made.
        """
        found = {}
        for source in supply.made:
            stays = source in (target, but) or source in supply.passes
            price = IMPOSSIBLE if stays else supply.price(source, target)
            if price < IMPOSSIBLE:
                found[source] = self.program.variable(price)
        return found

    def sliced(
        self,
        supply: Supply,
        target: MeshPlacements,
        replicated: MeshPlacements,
        gathered: Mapping[MeshPlacements, int],
    ) -> dict[MeshPlacements, int]:
        """Add a variable for slicing the value after it was gathered."""
        price = supply.price(replicated, target)
        if price == IMPOSSIBLE:
            return {}
        found = {}
        if replicated in supply.made:
            found[replicated] = self.program.variable(price)
        for source, gather in gathered.items():
            found[source] = self.program.variable(price)
            self.program.at_most([found[source]], [gather], 0.0)
        return found
