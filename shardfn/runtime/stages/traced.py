"""`Traced`, the captured program of a function, and `Lowered`, the program of one rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import attrs

from ... import _compat, extensions
from ... import schedule as passes
from ...accepted import accept
from ...buckets import BucketPlan
from ...capture import Arguments, Captured
from ...capture.annotations import is_of_pipeline
from ...compile.kernel_times import prices_as_run
from ...compile.memory import memory_as_run
from ...errors import PlacementError, ShardError, call_site
from ...hardware import H100, Hardware, Link, hardware_of, links_of
from ...inspect.alternatives import weighed_strategies
from ...inspect.budget import Explanation, explanation
from ...inspect.certificate import Certificate, certify
from ...inspect.implicit import report_implicit
from ...inspect.memory import Memory, Moment
from ...inspect.step_time import StepTime, step_time
from ...inspect.transfers import Fallback, Transfer, fallbacks, transfers
from ...inspect.verbose import verbose_text
from ...mesh import all_coordinates, group_names
from ...partition import Plan, cached_plan, local_sizes
from ...partition.collective_bytes import collectives_in
from ...partition.plan import Nested, Pipelined
from ...partition.rule_api import registry
from ...partition.slice_loops import batched_loops
from ...partition.split_backward import SplitPlan, split_backward
from ...placement_table import ArgumentPlacements, argument_placements
from ...random import ambient
from ...schedule.schedule_plan import with_bucket_options
from ...stage_log import artefact, stage
from ...types import TENSOR, Collective, LocalProgram, MeshPlacements, Program
from .. import cache
from ..arguments import (
    Placed,
    Taken,
    arguments_of,
    donated_places,
    marks_of_closed_over,
    place,
    taken,
)
from ..backward.second_half import Backward
from ..compiled import Compiled
from ..options import Request
from ..store import Stages
from . import known
from .compiling import Runner, runner
from .costly import warn_of_expensive
from .following import check_numbers, followed_capture
from .kinds import kinds_of_ranks
from .lowering import (
    backward_of,
    beside,
    coordinates_here,
    floating_results,
    forward_of,
    gradient_marks,
    local_program,
    out_marks,
    programs_of_all,
)

BATCHED = "shardfn_batched"  # the key under which a graph holds the captures before and after
WITHOUT_AUTOGRAD = (
    "call under torch.no_grad(), since the results contain the gradients; or use sf.shard of "
    "the loss alone, whose loss.backward() runs the stages one after the other"
)


def trace(request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """Stage 1 for one call's arguments. One thread runs it at a time."""
    with _compat.paused_gc(), _compat.staging():
        return traced_for(request, arguments_of(request, taken(request, args, kwargs)))


def explain_failed(request: Request, call: Taken, failed: Exception) -> None:
    """Raise the error of a program that has run for the first time as one of the function's own,
    with its frames, if Python has it too.
    """
    with _compat.staging():
        arguments = arguments_of(request, call)
        known.explain_failed(request, arguments, place(request, arguments), failed)


def traced_for(request: Request, arguments: Arguments) -> Traced:
    """Run stage 1 for an `Arguments` record, in the thread that stages."""
    placed = place(request, arguments)
    if request.has_own_sizes:
        return _traced_kinds(request, arguments, placed)
    request, captured = followed_capture(request, arguments, placed)
    check_numbers(request, captured)
    if placed.mesh is None and captured.brought_mesh is not None:
        over = attrs.evolve(request, mesh=captured.brought_mesh)
        without, placed = placed, place(over, arguments)
        if placed.avals != without.avals:  # those without values live there
            return traced_for(over, arguments)
    return _with_batched_loops(Traced(request=request, placed=placed, captured=captured))


def _with_batched_loops(traced: Traced) -> Traced:
    """Batch the loops over slices of sharded inputs. A capture has one record with its loops
    batched, as its compiled programs are found by it.
    """
    captured = traced.captured
    axes, ins, *_ = traced.placements()
    program = batched_loops(captured.program, axes, ins)
    if program is captured.program:
        return traced
    known = program.graph.meta.get(BATCHED)
    if known is None or known[0] is not captured:
        known = captured, attrs.evolve(captured, program=program)
        program.graph.meta[BATCHED] = known
    return attrs.evolve(traced, captured=known[1])


def _traced_kinds(request: Request, arguments: Arguments, placed: Placed) -> Traced:
    """Trace per-rank code once for each kind of rank."""
    kinds = kinds_of_ranks(request, arguments, placed)
    for kind in kinds:
        check_numbers(request, kind.captured)
    mine, *others = [
        Traced(request, kind.placed, kind.captured, ranks=kind.ranks) for kind in kinds
    ]
    return attrs.evolve(mine, others=tuple(others))


@attrs.frozen(eq=False, repr=False)
class Traced:
    """The captured program of a function, with global shapes.

    Example:
        >>> import torch, shardfn as sf
        >>> print(sf.value_and_grad(lambda w: (w * w).sum()).trace(torch.ones(3)).program.name)
        value_and_grad(<lambda>)
    """

    request: Request
    placed: Placed
    captured: Captured
    # where shards are uneven: the ranks that it is the program of, and those of the other ranks
    ranks: tuple[tuple[int, ...], ...] = ()
    others: tuple[Traced, ...] = ()

    @property
    def program(self) -> Program:
        return self.captured.program

    def __str__(self) -> str:
        return str(self.program)

    __repr__ = __str__

    def text(self) -> str:
        """The full text of the program."""
        return self.program.show(self.program, full=True)

    def placements(self) -> tuple[Any, ...]:
        """The arguments of the partition stage: the mesh, the placements of inputs and results, and
        which inputs are unreduced gradients.
        """
        mesh, axes, name = self.placed.mesh, self.placed.axes, self.request.name
        held = self.captured.closed_over
        nodes = self.program.graph.graph.find_nodes(op="placeholder")
        own = zip(held, nodes[len(nodes) - len(held) :], strict=True)
        closed = [marks_of_closed_over(name, *pair, mesh, axes) for pair in own]
        ins = (*self.placed.marks, *closed)
        outs = out_marks(self.request, self.program, self.placed)
        gradients = gradient_marks(self.request, self.placed)
        return axes, ins, [*outs, *gradients], self.placed.unreduced

    def lower(
        self,
        *,
        cap: int | str | None = None,
        first_cap: int | str | None = None,
        plan: BucketPlan | None = None,
    ) -> Lowered:
        """Partition and schedule the program, and return the program of one rank.

        Args:
            cap: the bytes at which buckets are closed, in place of the `cap` of `bucketed_grad`.
            first_cap: the bytes at which the first bucket is closed. If only `cap` is given,
                `first_cap` is 1 MiB, or `cap` if `cap` is smaller.
            plan: a bucket plan to use in place of the caps.

        Raises:
            PlacementError, RuleError: a placement leads to no correct program.
            TreeError: the plan was made for another program.
        """
        with _compat.staging(), _compat.paused_gc():
            cache.counts["partitions"] += 1
            mine = self._lowered(cap, first_cap, plan)
            if self.placed.is_simulated:
                mine = beside(mine, [x._lowered(cap, first_cap, plan) for x in self.others])
        if cap is first_cap is plan is None and not self.ranks:
            self.request.store.lowered[mine] = registry.active()
        return mine

    def _lowered(
        self, cap: int | str | None, first_cap: int | str | None, plan: BucketPlan | None
    ) -> Lowered:
        wanted, planner = self.placements(), self.request.planner
        with stage("partition", self.request.name) as note:
            planned = cached_plan(self.program, *wanted, planner=planner)
            note(steps=len(planned.steps))
        chosen = with_bucket_options(planned, self.request.name, cap, first_cap, plan)
        report_implicit(
            self.request.name,
            self.request.implicit_comm,
            chosen,
            lambda: weighed_strategies(self.program, *wanted, advice=chosen.advice),
        )
        warn_of_expensive(self, planned, wanted)
        if self.request.followed is None:
            return self._scheduled(chosen, self.program)
        piped = [x for x in chosen.steps if is_of_pipeline(x.node) and isinstance(x, Nested)]
        is_looped = not all(isinstance(x, Pipelined) for x in piped)
        if is_looped and chosen.stage_axis is not None:
            got = (
                "autograd records the call, and would differentiate the pipelined_grad in the "
                "function"
            )
            raise PlacementError.of(
                self.request.name, got, fix=WITHOUT_AUTOGRAD, source=call_site()
            )
        both = self.halves(chosen)
        forward = self._scheduled(both.forward, forward_of(self.program, both))
        backward = self._scheduled(both.backward, backward_of(self.program, both))
        return attrs.evolve(forward, halves=both, backward=backward)

    def halves(self, chosen: Plan) -> SplitPlan:
        """Split the plan of a call that torch's autograd records into forward and backward."""
        results = self.program.out_leaves.count(TENSOR)
        drawn = [i for i, x in enumerate(self._inputs()) if x is ambient.PLACEHOLDER_STATE]
        return split_backward(chosen, results, drawn)

    def _inputs(self) -> list[Any]:
        """List the closed-over tensors of the program; None stands for an argument."""
        return [*(None for _ in self.placed.tensors), *self.captured.closed_over]

    def _scheduled(self, chosen: Plan, paths: Program) -> Lowered:
        """Emit and schedule the program of each kind of rank for a plan."""
        names = group_names(self.placed.mesh)
        here = coordinates_here(self.placed)
        here = [c for c in here if c in self.ranks] if self.ranks else here
        kinds = local_sizes(chosen, here)
        programs: dict[tuple[Any, ...], LocalProgram] = {}
        name = self.request.name
        with stage("schedule", name) as note, _compat.patched("graphs"):
            agreed = passes.plan_schedule(chosen, name)
            for coordinate, size in kinds.items():
                if size not in programs:
                    programs[size] = local_program(
                        name, paths, self.placed, chosen, agreed, coordinate, names
                    )
            graph = programs[kinds[here[0]]].graph
            note(
                nodes=len(graph.nodes),
                collectives=sum(1 for _ in collectives_in(graph)),
                buckets=len(agreed.plan.buckets),
            )
        by_rank = {c: programs[size] for c, size in kinds.items()}
        lowered = Lowered(self, chosen, agreed, by_rank)
        if self.placed.coordinate in by_rank:  # not another reading, of ranks with other sizes
            lowered._leave_artefacts()
        return lowered


def lowered_as(traced: Traced, chosen: Plan, marks: tuple[MeshPlacements, ...]) -> Lowered:
    """Lower a traced program by a plan with other placements of its arguments."""
    with _compat.staging(), _compat.paused_gc():
        placed = attrs.evolve(traced.placed, marks=marks)
        options = with_bucket_options(chosen, traced.request.name, None, None, None)
        return attrs.evolve(traced, placed=placed)._scheduled(options, traced.program)


@attrs.frozen(eq=False, repr=False)
class Lowered:
    """The program of one rank, with explicit collectives."""

    traced: Traced
    partition: Plan
    schedule_plan: passes.SchedulePlan
    # by coordinates; ranks may share a program
    programs: dict[tuple[int, ...], LocalProgram]
    # where autograd follows the call: the second program, and how the first one's values reach it
    backward: Lowered | None = None
    halves: SplitPlan | None = attrs.field(default=None, repr=False)
    # programs of other coordinates of a pipeline's axis, once they are lowered
    _stages: Stages = attrs.field(factory=Stages, init=False, repr=False)

    @property
    def program(self) -> LocalProgram:
        """The program of this rank."""
        return self.programs[self.traced.placed.coordinate]

    @property
    def plan(self) -> BucketPlan:
        """The bucket plan, which is equal on all ranks."""
        return self.schedule_plan.plan

    @property
    def schedule(self) -> Certificate:
        """The certificate of the schedule, with times on an H100."""
        return self.certify(H100)

    def certify(self, hardware: Hardware | str) -> Certificate:
        """The certificate of the schedule, with times on the given hardware.

        Args:
            hardware: an `sf.Hardware`, or its name, such as "H100".

        Raises:
            ShardError: the hardware is unknown.
        """
        axis, own = self.partition.stage_axis, self.traced.placed.coordinate
        mine = [x for c, x in self.programs.items() if axis is None or c[axis] == own[axis]]
        programs = list(dict.fromkeys(mine))
        model = hardware_of(hardware, "Lowered.certify")
        return certify(programs, self.program, self.schedule_plan, model)

    def time(
        self, hardware: Hardware | str = H100, links: Mapping[str, Link] | None = None
    ) -> StepTime:
        """Predict the time of this rank's step, without running the step. Each op takes the time of
        its arithmetic or of its memory traffic, whichever is longer. Each collective takes its
        latency plus the time for its bytes. Ops and collectives overlap as scheduled. With the
        backend "inductor", a fused kernel reads its inputs and writes its results once, and its
        time is listed at its first op. The printed prediction says if the memory peak exceeds the
        memory of the device.

        Args:
            hardware: an `sf.Hardware`, or its name, such as "H100".
            links: a dict from mesh axes to `sf.Link`s, which replace the links of the hardware.

        Raises:
            ShardError: the hardware or a mesh axis is unknown.
        """
        accept("Lowered.time", links=links)
        names = self.program.axes.names
        model = hardware_of(hardware)
        own, stages = links_of(links, names), self._along_stages()
        peak, axis = lambda: self.memory.peak, self.partition.stage_axis
        prices = prices_as_run(self.traced.request.backend)
        whole = self.traced.program.graph.graph
        time = step_time(self.program, model, own, peak, stages, axis, prices, whole)
        return attrs.evolve(time, moments=self._moments)

    def _moments(self) -> tuple[Moment, ...]:
        """What this rank holds while each op runs, in order."""
        return self.memory.moments()

    def _along_stages(self) -> list[LocalProgram]:
        """The programs of all stages of a pipeline, at this rank's other coordinates."""
        axis = self.partition.stage_axis
        if axis is None:
            return []
        return [self.stage(k) for k in range(self.program.axes.sizes[axis])]

    def stage(self, k: int) -> LocalProgram:
        """Return the program of another rank along the pipeline axis.

        Args:
            k: the index of the rank on the pipeline axis.

        Raises:
            ShardError: no value is on a stage, or the pipeline axis does not have rank k.
        """
        accept("Lowered.stage", k=k)
        axis = self.partition.stage_axis
        if axis is None:
            fix = "place parameters with P(..., pp=0), and use sf.pipelined_grad"
            got = "no parameter is placed on a pipeline stage"
            raise ShardError.of("Lowered.stage", got, fix=fix, source=call_site())
        size, own = self.program.axes.sizes[axis], list(self.traced.placed.coordinate)
        if k >= size:
            got, fix = f"k is {k}, but the axis has {size} ranks", f"0 to {size - 1}"
            raise ShardError.of("Lowered.stage, k", got, fix=fix, source=call_site())
        own[axis] = k
        place = tuple(own)
        if place in self.programs:
            return self.programs[place]
        if k not in self._stages.programs:
            traced = self.traced
            self._stages.programs[k] = local_program(
                traced.request.name,
                traced.program,
                traced.placed,
                self.partition,
                self.schedule_plan,
                place,
                group_names(traced.placed.mesh),
            )
        return self._stages.programs[k]

    @property
    def memory(self) -> Memory:
        """The memory peak of this rank, and the tensors that are alive at the peak. Each access
        computes `memory` again.
        """
        donated = donated_places(self.traced.placed)
        return memory_as_run(self.program, self.traced.request.backend, donated)

    @property
    def placements(self) -> ArgumentPlacements:
        """The placements of the arguments, which print as a table and as text to paste."""
        return argument_placements(self.traced.placed)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective, and every message of a pipeline, in the order in which they start. The
        collectives of a scan are repeated for each step, and those of a stage for each microbatch.
        """
        return self.program.collectives

    def explain(self) -> Explanation:
        """Every collective as a table, as in `sf.explain`, with bytes, mesh axis, bucket, source
        line and module path. If torch's autograd records the call, the table includes the backward.
        """
        return explanation([half.program for half in self._halves()], self.plan)

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """Every collective of the plan, with the op that reads the result, and the other strategies
        of the op. Each access computes `transfers` again.
        """
        traced, advice = self.traced, self.partition.advice
        weighed = weighed_strategies(traced.program, *traced.placements(), advice=advice)
        return transfers(self.partition, self.traced.request.implicit_comm, weighed)

    @property
    def implicit(self) -> tuple[Transfer, ...]:
        """The transfers that no placement asked for."""
        return tuple(t for t in self.transfers if t.implicit)

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """The ops that fall back to replicated compute, with their costs."""
        return fallbacks(self.transfers)

    def verbose(self, rank: int = 0) -> str:
        """A text with every op and transfer, their placements, and the local shapes of one rank.
        The rank is given by its row-major index in the mesh.
        """
        accept("Lowered.verbose", rank=rank)
        every = all_coordinates(self.traced.placed.axes)
        if rank >= len(every):
            got, fix = f"rank is {rank}, but the mesh has {len(every)} ranks", "rank=0"
            raise ShardError.of("Lowered.verbose, rank", got, fix=fix, source=call_site())
        coordinates = every[rank]
        return verbose_text(self.partition, self.traced.request.name, coordinates)

    def draw(self, *, path: str | os.PathLike[str] | None = None) -> Any:
        """Draw the placements of the arguments, and the memory, the time and the collectives of a
        step.

        Args:
            path: the path of a file to write, which ends in ".png" or ".svg". Without `path`,
                `draw` writes no file.

        Returns:
            The `matplotlib.figure.Figure`, as `sf.draw` returns it.

        Raises:
            ShardError: the path has another ending, or matplotlib is not installed.
            ImportError: the package shardfn.pictures is not installed.
        """
        found = extensions.service(extensions.Pictures)
        if found is None:
            raise extensions.absent("Lowered.draw", "pictures")
        return found.draw(self, path=path)

    def report(
        self, *, path: str | os.PathLike[str] = "report.html", hardware: Hardware | str = H100
    ) -> Any:
        """Write an HTML page about the time, the memory and the communication of the step, as
        `sf.report` does.

        Args:
            path: the path of the HTML page.
            hardware: an `sf.Hardware`, or a name such as "H100".

        Returns:
            The `sf.Report`, which prints as a summary.

        Raises:
            ShardError: the hardware is unknown, or the file cannot be written.
            ImportError: the package shardfn.reports is not installed.
        """
        found = extensions.service(extensions.Reports)
        if found is None:
            raise extensions.absent("Lowered.report", "reports")
        return found.report(self, path=path, hardware=hardware)

    def _repr_html_(self) -> str | None:
        """Draw a picture in a notebook."""
        return extensions.page_of(self)

    def __str__(self) -> str:
        return "\n".join(str(half.program) for half in self._halves())

    __repr__ = __str__

    def _leave_artefacts(self) -> None:
        """Write what this stage has made to the log and the trace, where they are on."""
        name, program = self.traced.request.name, self.program
        artefact("local_program", name, lambda: program.show(program, full=True))
        if self.plan.leaves:
            artefact("bucket_plan", name, lambda: str(self.plan))
        artefact("explain", name, lambda: str(self.explain()))
        artefact("memory", name, lambda: str(self.memory))

    def _halves(self) -> list[Lowered]:
        return [self] if self.backward is None else [self, self.backward]

    def text(self) -> str:
        """The full text of the program."""
        programs = [half.program for half in self._halves()]
        return "\n".join(program.show(program, full=True) for program in programs)

    def compile(self, backend: str | None = None, *, warm: bool = False) -> Compiled:
        """Compile the program of this rank, in the background if `warmup` is set."""
        accept("Lowered.compile", backend=backend, warm=warm)
        traced = self.traced
        every = traced, *traced.others
        backend = backend or traced.request.backend
        return Compiled(
            traced.request,
            traced.placed,
            traced.captured,
            self.partition,
            self.programs,
            backend,
            self._runner(backend, warm=warm and self.backward is None),
            self._backward(backend),
            captures={c: x.captured for x in every for c in x.ranks},
            of_all=programs_of_all(self),
        )

    def _runner(
        self, backend: str, *, warm: bool = False, is_backward: bool = False
    ) -> Runner | None:
        """Compile the program; None in a simulated world, where nothing is compiled."""
        traced = self.traced
        if traced.placed.is_simulated:
            return None
        template, request = traced.captured.template, traced.request
        digests = None if is_backward else extensions.digests()
        with _compat.staging():
            made = runner(
                request.name,
                traced.placed,
                self.partition,
                self.schedule_plan,
                self.program,
                backend if digests is None else "aten",
                None if template is None else cache.families(template),
                has_own_sizes=bool(traced.ranks),
                may_have_own_sizes=request.rank is not None,
                warmup=request.warmup if warm and digests is None else None,
                is_backward=is_backward,
                cuda_graphs=request.cuda_graphs and digests is None,
            )
        return made if digests is None else digests.runner(self, made)

    def _backward(self, backend: str) -> Backward | None:
        """Compile the backward, where autograd follows the call."""
        if self.backward is None:
            return None
        assert self.halves is not None
        traced = self.traced
        return Backward(
            traced.request,
            traced.placed,
            traced.captured,
            self.halves,
            self.programs,
            self.backward.programs,
            tuple(floating_results(traced.program)),
            self.backward._runner(backend, is_backward=True),
        )
