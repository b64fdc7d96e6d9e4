"""The placements of free arguments that are worth a comparison: the solutions of the integer
program, and those of textbooks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import combinations

import attrs
import torch

from ...hardware import H100, Hardware
from ...types import Marks, MeshAxes, Program
from .. import plan
from ..planner import work
from ..planner.axis_problem import AxisProblem, Free, undecided
from ..planner.flattened import Flattened
from ..planner.observed import Observed
from ..planner.price import PlanPrice, plan_price, sending
from ..planner.starts import timed_on
from ..propagate import walked
from ..propagation.walk import Walk
from ..redistribute import local_bytes
from ..shared_plans import shared_plan
from . import fused
from .moments import Moments
from .tensor_parallel import sharded_dims
from .unknowns import Unknowns, data_parallel, textbook

__all__ = ["Candidate", "Search", "ranked", "timed_on"]

# Among placements that take about the least time, the one that sends the fewest bytes is taken.
ABOUT = 1.05
MOST = 64  # ranks of tensor parallelism


@attrs.frozen(eq=False)
class Candidate:
    """Placements of all arguments, and the program that they give.

    Args:
        marks: of the arguments.
        plan: of all ops.
        price: of the plan.
    """

    marks: tuple[Marks, ...]
    plan: plan.Plan
    price: PlanPrice


@attrs.define(eq=False)
class Search:
    """A search for the placements of the arguments of a program.

    Args:
        program: the Program.
        flat: the same without scans.
        unknowns: the free arguments of that.
        axes: of the mesh.
        timed: the same, with the cost of each.
        unreduced: which inputs are unreduced gradients.
        planner: of the ops.
        hardware: that computes.
        is_late: whether time was up for some integer program.
    """

    program: Program
    flat: Flattened
    unknowns: Unknowns
    axes: MeshAxes
    timed: MeshAxes
    unreduced: Sequence[int]
    planner: str
    hardware: Hardware = H100
    is_late: bool = False
    known: dict[tuple[Marks, ...], Candidate] = attrs.field(factory=dict)

    def candidates(self, limit: float | None) -> list[Candidate]:
        """Placements, the best first.

        Args:
            limit: bytes of a rank, which those of the integer program keep to.
        """
        most = float("inf") if limit is None else limit
        books = [marks for marks in self.textbook() if self.held(marks) <= most]
        rows = list(dict.fromkeys([*books, *self.solved(limit)]))
        if limit is None:
            rows = list(self.worthwhile(rows))
        return ranked([self.candidate(marks) for marks in rows])

    def worthwhile(self, rows: list[tuple[Marks, ...]]) -> Iterator[tuple[Marks, ...]]:
        """Placements without those whose gradients and results alone take longer to send than
        all of another one.
        """
        least = min((x.price.total for x in self.known.values()), default=float("inf"))
        outs = self.unknowns.leaving
        asked = {}
        for marks in rows:
            walk = Walk(self.timed, self.program.name)
            first = walked(walk, self.program, marks, outs, self.unreduced)
            asked[marks] = sending(first, self.program.graph.graph, is_asked=True)
        for marks in sorted(rows, key=asked.__getitem__):
            if marks in self.known or asked[marks] <= ABOUT * least:
                yield marks
                least = min(least, self.total(marks))

    def held(self, marks: tuple[Marks, ...]) -> float:
        """The bytes of the arguments of a rank."""
        values = [node.meta["val"] for node in self.unknowns.holders]
        rows = zip(values, marks, strict=True)
        return sum(local_bytes(work.nbytes(x), m, self.axes.sizes, -1) for x, m in rows)

    def candidate(self, marks: tuple[Marks, ...]) -> Candidate:
        """The program with such placements."""
        if marks in self.known:
            return self.known[marks]
        outs = self.unknowns.leaving
        chosen = shared_plan(self.program, self.axes, marks, outs, self.unreduced, self.planner)
        graph = self.program.graph.graph
        over = attrs.evolve(chosen, axes=self.timed)
        price = plan_price(over, graph, functools.partial(fused.in_bytes, hardware=self.hardware))
        self.known[marks] = Candidate(marks, chosen, price)
        return self.known[marks]

    def textbook(self) -> list[tuple[Marks, ...]]:
        """Data parallel, tensor parallel over one axis, and both fully sharded over some of the
        other axes; with batches that leave ranks without a row, too.
        """
        every = [k for k, n in enumerate(self.axes.sizes) if n > 1]
        some = [over for size in range(1, len(every)) for over in combinations(every, size)]
        rows = [textbook(self.unknowns, over) for over in ((), *some, every)]
        rows += [textbook(self.unknowns, over, is_uneven=True) for over in ((), every)]
        for axis in every:
            dims = {axis: self.tensor_parallel(axis)}
            others = [k for k in every if k != axis]
            if dims[axis] and self.axes.sizes[axis] <= MOST:
                rows += [textbook(self.unknowns, over, dims) for over in ((), others)]
        return list(dict.fromkeys(map(tuple, rows)))

    def tensor_parallel(self, axis: int) -> dict[torch.fx.Node, int]:
        """The dims of parameters that tensor parallelism over an axis shards."""
        parameters = self.unknowns.followers.parameters
        nodes = list(self.flat.program.graph.graph.nodes)
        rows = self.unknowns.rows
        return sharded_dims(nodes, parameters, self.axes.sizes[axis], rows)

    def solved(self, limit: float | None) -> Iterator[tuple[Marks, ...]]:
        """The solutions of the integer programs. The first axes may leave memory to the later
        ones, or keep to the limit alone.
        """
        most = float("inf") if limit is None else limit
        start, *others = self.starts()
        for limits in dict.fromkeys((self.hopeful(most), self.strict(most))):
            found = list(self.solved_from(start, limits))
            yield from found
            least = min(map(self.total, found), default=float("inf"))
            for other in others:
                for marks in self.solved_from(other, limits):
                    # what sends early may overlap, which these programs do not count
                    if ABOUT * self.total(marks) < least:
                        yield marks

    def total(self, marks: tuple[Marks, ...]) -> float:
        """The price of the program with such placements."""
        return self.candidate(marks).price.total

    def solved_from(
        self, start: tuple[Marks, ...], limits: Sequence[float | None]
    ) -> Iterator[tuple[Marks, ...]]:
        """The solutions under a limit of each axis, from one start."""
        marks = self.solution(start, limits)
        if marks is None:
            return
        yield marks
        if len(limits) > 1:
            # earlier axes know now what later ones shard
            again = self.solution(marks, limits)
            yield marks if again is None else again

    def starts(self) -> list[tuple[Marks, ...]]:
        """Placements from which integer programs begin. Ops on sorted rows that stay on their
        rank have no strategies, so these programs begin with nothing sharded, too.
        """
        sharded = tuple(data_parallel(self.unknowns))
        if not self.walked(sharded)[0].own_rows:
            return [sharded]
        nowhere = ("R",) * len(self.axes.sizes)
        given = self.unknowns.given
        return [sharded, tuple(given[x] or nowhere for x in self.unknowns.holders)]

    def walked(self, start: tuple[Marks, ...]) -> tuple[Walk, plan.Plan]:
        """The first walk, without scans, and its plan."""
        walk = Walk(self.timed, self.program.name)
        outs = self.unknowns.leaving
        first = walked(walk, self.flat.program, start, outs, self.unreduced)
        return walk, first

    def least(self) -> Candidate | None:
        """The placements that need the least memory."""
        start = tuple(data_parallel(self.unknowns))
        nothing = tuple(None for _ in self.axes.sizes)
        marks = self.solution(start, nothing)
        return None if marks is None else self.candidate(marks)

    def hopeful(self, limit: float) -> tuple[float, ...]:
        """Limits if every later axis shards everything."""
        found = []
        for n in reversed(self.axes.sizes):
            found.append(limit)
            limit *= n
        return tuple(reversed(found))

    def strict(self, limit: float) -> tuple[float, ...]:
        """The limit on every axis."""
        return tuple(limit for _ in self.axes.sizes)

    def solution(
        self, start: tuple[Marks, ...], limits: Sequence[float | None]
    ) -> tuple[Marks, ...] | None:
        """The placements by an integer program for each axis. None if one has no solution.

        Args:
            start: placements, whose program the first walk observes.
            limits: bytes of a rank, for each axis. None: the least is looked for.
        """
        walk, first = self.walked(start)
        observed = Observed(walk, self.flat.program, first, self.flat)
        moments = Moments(self.flat.program.graph.graph, observed.nodes)
        in_bytes = functools.partial(fused.in_bytes, hardware=self.hardware)
        decided = undecided(observed)
        for axis, limit in enumerate(limits):
            free = Free(self.unknowns, moments, limit)
            problem = AxisProblem(observed, axis, decided, free, in_bytes)
            found = problem.solve()
            if found is None:
                self.is_late = self.is_late or not problem.program.is_impossible
                return None
            decided = found
        given = self.unknowns.given
        return tuple(
            decided.inputs[node] if given[node] is None else _known(given[node])
            for node in self.unknowns.holders
        )


def _known(marks: Marks | None) -> Marks:
    assert marks is not None
    return marks


def ranked(found: list[Candidate]) -> list[Candidate]:
    """Candidates by their time. Of those that take about the least, the one that sends the
    fewest bytes is first.
    """
    rest = sorted(found, key=lambda x: (x.price.total, x.price.sent))
    order = []
    while rest:
        near = [x for x in rest if x.price.total <= ABOUT * rest[0].price.total]
        best = min(near, key=lambda x: (x.price.nbytes, x.price.total))
        order.append(best)
        rest.remove(best)
    return order
