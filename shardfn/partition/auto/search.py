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
from ...types import MeshAxes, MeshPlacements, Program
from .. import plan
from ..plan_cache import cached_plan
from ..planner import op_cost
from ..planner.axis_problem import AxisProblem, Free, undecided
from ..planner.inline_loops import InlinedProgram
from ..planner.observed_walk import ObservedWalk
from ..planner.plan_price import PlanPrice, explicit_price, plan_price
from ..planner.start_costs import with_hardware_links
from ..propagate import run_walk
from ..propagation.experts import expert_dims
from ..propagation.walk import Walk
from ..redistribute import local_bytes
from . import fused_op_cost
from .free_arguments import FreeArguments, data_parallel, textbook
from .memory_peaks import MemoryPeaks
from .tensor_parallel import sharded_dims

__all__ = ["Candidate", "Search", "ranked", "with_hardware_links"]

# Among placements that take about the least time, the one that sends the fewest bytes is taken.
ABOUT = 1.05
MOST = 64  # ranks of tensor parallelism


@attrs.frozen(eq=False)
class Candidate:
    """One choice of placements for all arguments, with its plan and price.

    Args:
        placements: of the arguments.
        plan: of all ops.
        price: of the plan.
    """

    placements: tuple[MeshPlacements, ...]
    plan: plan.Plan
    price: PlanPrice


@attrs.define(eq=False)
class Search:
    """The search of `sf.auto` for the placements of a program's arguments.

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
    flat: InlinedProgram
    unknowns: FreeArguments
    axes: MeshAxes
    axes_with_costs: MeshAxes
    unreduced: Sequence[int]
    planner: str
    hardware: Hardware = H100
    is_late: bool = False
    known: dict[tuple[MeshPlacements, ...], Candidate] = attrs.field(factory=dict)

    def candidates(self, limit: float | None) -> list[Candidate]:
        """List candidate placements, the fastest first.

        Args:
            limit: bytes of a rank, which those of the integer program keep to.
        """
        most = float("inf") if limit is None else limit
        textbooks = [
            placements for placements in self.textbook() if self.argument_bytes(placements) <= most
        ]
        rows = list(dict.fromkeys([*textbooks, *self.solved(limit)]))
        if limit is None:
            rows = list(self.without_slow(rows))
        return ranked([self.candidate(placements) for placements in rows])

    def without_slow(
        self, rows: list[tuple[MeshPlacements, ...]]
    ) -> Iterator[tuple[MeshPlacements, ...]]:
        """Drop placements whose explicit collectives alone take longer than all of another
        candidate.
        """
        least = min((x.price.total for x in self.known.values()), default=float("inf"))
        outs = self.unknowns.leaving
        explicit = {}
        for placements in rows:
            walk = Walk(self.axes_with_costs, self.program.name)
            first = run_walk(walk, self.program, placements, outs, self.unreduced)
            explicit[placements] = explicit_price(first, self.program.graph.graph)
        for placements in sorted(rows, key=explicit.__getitem__):
            if placements in self.known or explicit[placements] <= ABOUT * least:
                yield placements
                least = min(least, self.total(placements))

    def argument_bytes(self, placements: tuple[MeshPlacements, ...]) -> float:
        """Return the bytes of one rank's arguments."""
        values = [node.meta["val"] for node in self.unknowns.holders]
        rows = zip(values, placements, strict=True)
        return sum(local_bytes(op_cost.nbytes(x), m, self.axes.sizes, -1) for x, m in rows)

    def candidate(self, placements: tuple[MeshPlacements, ...]) -> Candidate:
        """Plan the program with these argument placements, and price it; each placement is
        planned once.
        """
        if placements in self.known:
            return self.known[placements]
        outs = self.unknowns.leaving
        chosen = cached_plan(
            self.program, self.axes, placements, outs, self.unreduced, self.planner
        )
        graph = self.program.graph.graph
        over = attrs.evolve(chosen, axes=self.axes_with_costs)
        price = plan_price(
            over, graph, functools.partial(fused_op_cost.in_bytes, hardware=self.hardware)
        )
        self.known[placements] = Candidate(placements, chosen, price)
        return self.known[placements]

    def textbook(self) -> list[tuple[MeshPlacements, ...]]:
        """List textbook placements: data parallel, fully sharded over subsets of axes, tensor
        parallel over one axis, expert parallel over one axis.
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
        dims_of_experts = self.expert_parallel()
        for axis in every if dims_of_experts else ():
            experts = {axis: dims_of_experts}
            rows += [textbook(self.unknowns, over, {}, experts) for over in ((), every)]
        return list(dict.fromkeys(map(tuple, rows)))

    def expert_parallel(self) -> dict[torch.fx.Node, int]:
        """Map the parameters of experts to the dim of their experts."""
        graph = self.flat.program.graph.graph
        return expert_dims(graph, self.program.name, self.unknowns.followers.parameters)

    def tensor_parallel(self, axis: int) -> dict[torch.fx.Node, int]:
        """Map parameters to the dim that tensor parallelism over one axis shards."""
        parameters = self.unknowns.followers.parameters
        nodes = list(self.flat.program.graph.graph.nodes)
        rows = self.unknowns.rows
        return sharded_dims(nodes, parameters, self.axes.sizes[axis], rows)

    def solved(self, limit: float | None) -> Iterator[tuple[MeshPlacements, ...]]:
        """Yield the placements that integer programs find under a memory limit."""
        most = float("inf") if limit is None else limit
        start, *others = self.starts()
        for limits in dict.fromkeys((self.growing_limits(most), self.equal_limits(most))):
            found = list(self.solved_from(start, limits))
            yield from found
            least = min(map(self.total, found), default=float("inf"))
            for other in others:
                for placements in self.solved_from(other, limits):
                    # what sends early may overlap, which these programs do not count
                    if ABOUT * self.total(placements) < least:
                        yield placements

    def total(self, placements: tuple[MeshPlacements, ...]) -> float:
        """Return the total time of the program with these argument placements."""
        return self.candidate(placements).price.total

    def solved_from(
        self, start: tuple[MeshPlacements, ...], limits: Sequence[float | None]
    ) -> Iterator[tuple[MeshPlacements, ...]]:
        """Yield the solver's placements from one start, and again from its first solution."""
        placements = self.solution(start, limits)
        if placements is None:
            return
        yield placements
        if len(limits) > 1:
            # earlier axes know now what later ones shard
            again = self.solution(placements, limits)
            yield placements if again is None else again

    def starts(self) -> list[tuple[MeshPlacements, ...]]:
        """List the placements from which the solver starts: data parallel, and replicated if
        rows are sorted locally.
        """
        sharded = tuple(data_parallel(self.unknowns))
        if not self.run_walk(sharded)[0].overrides:
            return [sharded]
        nowhere = ("R",) * len(self.axes.sizes)
        given = self.unknowns.given
        return [sharded, tuple(given[x] or nowhere for x in self.unknowns.holders)]

    def run_walk(self, start: tuple[MeshPlacements, ...]) -> tuple[Walk, plan.Plan]:
        """Run the first walk over the program without scans. Returns the walk and its plan."""
        walk = Walk(self.axes_with_costs, self.program.name)
        outs = self.unknowns.leaving
        first = run_walk(walk, self.flat.program, start, outs, self.unreduced)
        return walk, first

    def least(self) -> Candidate | None:
        """Return the candidate that needs the least memory."""
        start = tuple(data_parallel(self.unknowns))
        nothing = tuple(None for _ in self.axes.sizes)
        placements = self.solution(start, nothing)
        return None if placements is None else self.candidate(placements)

    def growing_limits(self, limit: float) -> tuple[float, ...]:
        """Return a memory limit per axis that assumes that every later axis shards everything."""
        found = []
        for n in reversed(self.axes.sizes):
            found.append(limit)
            limit *= n
        return tuple(reversed(found))

    def equal_limits(self, limit: float) -> tuple[float, ...]:
        """Return the same memory limit for every axis."""
        return tuple(limit for _ in self.axes.sizes)

    def solution(
        self, start: tuple[MeshPlacements, ...], limits: Sequence[float | None]
    ) -> tuple[MeshPlacements, ...] | None:
        """Solve one integer program per mesh axis for argument placements. None if one has no
        solution.

        Args:
            start: placements, whose program the first walk observes.
            limits: bytes of a rank, for each axis. None: the smallest peak is looked for.
        """
        walk, first = self.run_walk(start)
        observed = ObservedWalk(walk, self.flat.program, first, self.flat)
        moments = MemoryPeaks(self.flat.program.graph.graph, observed.nodes)
        in_bytes = functools.partial(fused_op_cost.in_bytes, hardware=self.hardware)
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


def _known(placements: MeshPlacements | None) -> MeshPlacements:
    """Assert that an argument has placements."""
    assert placements is not None
    return placements


def ranked(found: list[Candidate]) -> list[Candidate]:
    """Sort candidates by time; among those within 5% of the fastest, the one that sends the
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
