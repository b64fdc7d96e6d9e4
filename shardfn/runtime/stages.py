"""The inspectable stages of a transformed function: Traced and Lowered; compiled.py has the
third.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from .. import _compat, _tree
from .. import schedule as passes
from ..buckets import BucketPlan
from ..capture import Captured, capture, constant_key
from ..capture.rewrites import decompositions
from ..capture.views import memory_of
from ..compile import BACKENDS
from ..compile.backends import Runner, donate
from ..compile.collective_order import refuse_other_order
from ..errors import PlacementError, TreeError, call_site, problem
from ..hardware import H100, Hardware
from ..inspect.alternatives import considered
from ..inspect.certificate import Certificate, certify
from ..inspect.implicit import report_implicit
from ..inspect.transfers import Fallback, Transfer, fallbacks, transfers
from ..inspect.verbose import verbose_text
from ..mesh import all_coordinates, axes_of, group_names, is_over
from ..ops.loops import inner_nodes
from ..partition import Plan, emit, local_sizes, propagate
from ..partition.printing import local_text
from ..partition.rule_api import registry
from ..placements import check_pending, is_spec, marks_of
from ..schedule.agenda import rewished
from ..types import TENSOR, Collective, LocalProgram, Marks, Program, ShapeDtype
from ..world import World
from . import cache
from .agreement import agree
from .arguments import Placed, aval_of, look
from .compiled import Compiled
from .options import Request

log = logging.getLogger("shardfn")


def trace(
    request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Traced:
    """Stage 1 for one call's arguments; one thread at a time."""
    with _compat.staging():
        return _traced(request, args, kwargs)


def _traced(
    request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Traced:
    placed = look(request, args, kwargs)
    leaves, treedef = _tree.flatten((args, kwargs))
    whole = (
        decompositions.table().keys() & registry.ops()
    )  # composite ops that are not taken apart: they have a rule
    is_tensor = [isinstance(x, (torch.Tensor, ShapeDtype)) for x in leaves]
    rows = zip(leaves, is_tensor, strict=True)
    avals = [
        aval_of(x, placed.mesh) if tensor else constant_key(x) for x, tensor in rows
    ]
    signature = (treedef, avals, whole, placed.state)
    known = cache.programs(request)
    captured = next(
        (made.captured for made in known if _is_for(made, signature, placed)), None
    )
    if captured is None:
        cache.counts["captures"] += 1
        device = placed.mesh.device_type if placed.mesh is not None else "cpu"
        paths = list(placed.paths)
        captured = capture(
            request.fn,
            request.name,
            args,
            kwargs,
            paths,
            request.signature_of,
            device,
            frozenset(whole),
            placed.mesh,
        )
        known[:] = [made for made in known if not made.captured.reads.is_lost()]
        del known[: max(0, len(known) - cache.PROGRAMS + 1)]
        known.append(Made(signature, placed.world, placed.mesh, captured))
    captured.outside.refuse_lost(request.name)
    if (
        placed.mesh is None and captured.brought_mesh is not None
    ):  # a shard_map inside has brought it along
        placed = look(
            attrs.evolve(request, mesh=captured.brought_mesh), args, kwargs
        )
    return Traced(request=request, placed=placed, captured=captured)


@attrs.frozen(eq=False)
class Made:
    """What was captured, and of which call."""

    signature: tuple[Any, ...]
    world: World
    mesh: Any
    captured: Captured


def _is_for(made: Made, signature: Any, placed: Placed) -> bool:
    """Whether what was captured for one call holds for another.

    With a shard_map inside it depends on names and sizes of the mesh. Where it asks for the
    world or the mesh, it depends on those.
    """
    captured = made.captured
    if (
        made.signature != signature
        or not captured.reads.same()
        or not captured.outside.is_known()
    ):
        return False
    elsewhere = made.world is not placed.world or made.mesh is not placed.mesh
    if captured.reads.asks_world and elsewhere:
        return False
    own = captured.own_mesh
    if own is not None and (is_over(own) or own != (placed.mesh or own)):
        return False
    if captured.mesh is None:
        return True
    if placed.mesh is None:
        return captured.brought_mesh is not None
    return axes_of(captured.mesh) == placed.axes


@attrs.frozen(eq=False, repr=False)
class Traced:
    """A function read into one global program.

    Example:
        >>> import torch, shardfn as sf
        >>> print(
        ...     sf.value_and_grad(lambda w: (w * w).sum())
        ...     .trace(torch.ones(3))
        ...     .program.name
        ... )
        value_and_grad(<lambda>)
    """

    request: Request
    placed: Placed
    captured: Captured

    @property
    def program(self) -> Program:
        return self.captured.program

    def __str__(self) -> str:
        return str(self.program)

    __repr__ = __str__

    def text(self) -> str:
        """The whole program."""
        return self.program.show(self.program, full=True)

    def placements(self) -> tuple[Any, ...]:
        """What partition is to keep to: the mesh, the placements of inputs and results, and
        which inputs are unreduced.
        """
        axes = self.placed.axes
        whole: Marks = ("R",) * len(axes.names)
        ins = (*self.placed.marks, *[whole] * len(self.captured.closed_over))
        return (
            axes,
            ins,
            _out_marks(self.request, self.program, self.placed),
            self.placed.unreduced,
        )

    def lower(
        self,
        *,
        cap: int | str | None = None,
        first_cap: int | str | None = None,
        plan: BucketPlan | None = None,
    ) -> Lowered:
        """Stages 2 and 3: one rank's program, scheduled.

        Args:
            cap: bytes at which buckets close, instead of what bucketed_grad says.
            first_cap: the same of the first; 1MiB, or cap if that is less, where only cap is given.
            plan: buckets to use instead.

        Raises:
            PlacementError, RuleError: a placement that cannot be right.
            TreeError: a plan of another program.
        """
        with _compat.staging(), _compat.paused_gc():
            cache.counts["partitions"] += 1
            return self._lowered(cap, first_cap, plan)

    def _lowered(
        self,
        cap: int | str | None,
        first_cap: int | str | None,
        plan: BucketPlan | None,
    ) -> Lowered:
        wanted = self.placements()
        chosen = propagate(self.program, *wanted)
        chosen = rewished(chosen, self.request.name, cap, first_cap, plan)
        report_implicit(
            self.request.name,
            self.request.implicit_comm,
            chosen,
            lambda: considered(self.program, *wanted),
        )
        names = group_names(self.placed.mesh)
        kinds = {c: local_sizes(chosen, c) for c in _coordinates(self.placed)}
        programs, agreed = (
            dict.fromkeys(kinds.values()),
            passes.agenda(chosen, self.request.name),
        )
        if agreed.plan.leaves:
            log.info("%s", agreed.plan)
            _compat.trace_artifact("shardfn_bucket_plan", str(agreed.plan))
        for coordinate, size in kinds.items():
            programs[size] = programs[size] or _local(
                self, chosen, agreed, coordinate, names
            )
        return Lowered(
            self, chosen, agreed, {c: programs[size] for c, size in kinds.items()}
        )


def _coordinates(placed: Placed) -> list[tuple[int, ...]]:
    """The ranks whose programs are needed here: all in a simulated world, else this one."""
    simulated = placed.world.kind == "simulated" and placed.mesh is not None
    return all_coordinates(placed.axes) if simulated else [placed.coordinate]


def _local(
    traced: Traced,
    chosen: Plan,
    agreed: passes.Agenda,
    coordinate: tuple[int, ...],
    names: tuple[str, ...],
) -> LocalProgram:
    program, placed = traced.program, traced.placed
    device = placed.mesh.device_type if placed.mesh is not None else "cpu"
    graphs = passes.schedule(emit(chosen, coordinate, names, device), agreed)
    sizes = dict(zip(placed.axes.names, placed.axes.sizes, strict=True))
    elided = [
        n.name
        for n in graphs[0].nodes
        if "collective" in n.meta and sizes[n.meta["collective"].axis] == 1
    ]
    return LocalProgram(
        name=traced.request.name,
        axes=placed.axes,
        graph=graphs[-1],
        unordered=graphs[-2],
        in_paths=program.in_paths,
        in_marks=tuple(slot.marks for slot in chosen.ins),
        out_marks=tuple(slot.marks for slot in chosen.outs),
        out_paths=program.out_paths,
        elided=tuple(sorted(elided)),
        show=local_text,
    )


def _out_marks(
    request: Request, program: Program, placed: Placed
) -> list[Marks | None]:
    """What out_placements asks of each tensor of the result."""
    values = [
        n.meta["val"]
        for n in program.graph.graph.find_nodes(op="output")[0].args[0]
    ]
    if request.out_placements is None:
        return [None] * len(values)
    result = _tree.unflatten(program.out_tree, program.out_leaves)
    try:
        specs = _tree.broadcast_prefix(request.out_placements, result, is_spec)
        pairs = [
            spec
            for spec, leaf in zip(specs, program.out_leaves, strict=True)
            if leaf is TENSOR
        ]
        asked = [
            None if s is None else marks_of(s, v.shape, placed.axes)
            for s, v in zip(pairs, values, strict=True)
        ]
        for marks, v in zip(asked, values, strict=True):
            check_pending(marks or (), v.dtype)
        return asked
    except ValueError as error:
        kind = (
            TreeError
            if len(error.args) > 1 or "placements" in str(error)
            else PlacementError
        )
        fix = "a prefix of the result's tree, with placements that fit each tensor"
        source = call_site()
        text = problem(
            f"{request.name}, out_placements",
            *map(str, error.args),
            fix=fix,
            source=source,
        )
        raise kind(
            text, placements=request.out_placements, source=source, fix=fix
        ) from None


@attrs.frozen(eq=False, repr=False)
class Lowered:
    """One rank's program, with explicit collectives."""

    traced: Traced
    partition: Plan
    agenda: passes.Agenda
    programs: dict[
        tuple[int, ...], LocalProgram
    ]  # by coordinates; ranks share programs

    @property
    def program(self) -> LocalProgram:
        """This rank's program."""
        return self.programs[self.traced.placed.coordinate]

    @property
    def plan(self) -> BucketPlan:
        """Which gradients travel together; equal on all ranks."""
        return self.agenda.plan

    @property
    def schedule(self) -> Certificate:
        """What is proved of the order of the program, and its worth on an H100."""
        return self.certify(H100)

    def certify(self, hardware: Hardware) -> Certificate:
        """The certificate of the schedule under a model of the hardware."""
        return certify(
            list(dict.fromkeys(self.programs.values())),
            self.program,
            self.agenda,
            hardware,
        )

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective, in the order in which it starts; those of a scan as often as it
        runs them.
        """
        return tuple(
            n.meta["collective"]
            for n in inner_nodes(self.program.graph)
            if "collective" in n.meta
        )

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """Every collective of the plan with who needs it and what else was weighed; priced anew
        each time it is asked for.
        """
        weighed = considered(self.traced.program, *self.traced.placements())
        return transfers(self.partition, self.traced.request.implicit_comm, weighed)

    @property
    def implicit(self) -> tuple[Transfer, ...]:
        """The transfers that no placement asked for."""
        return tuple(t for t in self.transfers if t.implicit)

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """The ops that are computed whole on every rank, with what that costs."""
        return fallbacks(self.transfers)

    def verbose(self, rank: int = 0) -> str:
        """Every op and transfer with placements, and the local shapes of one rank of the mesh,
        counted in row-major order.
        """
        coordinates = all_coordinates(self.traced.placed.axes)[rank]
        return verbose_text(self.partition, self.traced.request.name, coordinates)

    def __str__(self) -> str:
        return str(self.program)

    __repr__ = __str__

    def text(self) -> str:
        """The whole program."""
        return self.program.show(self.program, full=True)

    def compile(self, backend: str | None = None) -> Compiled:
        """Stage 4: something to run."""
        request, placed = self.traced.request, self.traced.placed
        backend = backend or request.backend
        with _compat.staging():
            runner = _runner(self, backend)
        captured = self.traced.captured
        return Compiled(
            request,
            placed,
            captured,
            self.partition,
            self.programs,
            backend,
            runner,
        )


def _runner(lowered: Lowered, backend: str) -> Runner | None:
    """The compiled local program; None in a simulated world, where the simulator runs it."""
    request, placed = lowered.traced.request, lowered.traced.placed
    if placed.world.kind == "simulated" and placed.mesh is not None:
        return None
    if (
        placed.world.kind == "real"
        and placed.world.size > 1
        and placed.mesh is not None
    ):
        agree(request.name, lowered.partition, lowered.agenda)
    if placed.mesh is not None:
        _bind_groups(placed)
    cache.counts["compilations"] += backend != "aten"
    graph = torch.fx.GraphModule(
        torch.nn.Module(), passes.copied(lowered.program.graph)
    )
    donated = _donated(lowered)
    if backend == "aten":
        return BACKENDS[backend](graph, donated)
    runner = BACKENDS[backend](donate(graph, _donations(lowered, donated)), donated)
    if code := _compat.generated_code(runner):
        refuse_other_order(request.name, lowered.program.graph, code)
    return runner


def _bind_groups(placed: Placed) -> None:
    """Bind the axes' names to this rank's process groups, once."""
    for k, name in enumerate(group_names(placed.mesh)):
        _compat.register_group(name, placed.mesh.get_group(k))


def _donated(lowered: Lowered) -> list[int]:
    """Which placeholders are donated inputs."""
    placed = lowered.traced.placed
    skip = len(placed.axes.names)
    return [
        skip + k for k, leaf in enumerate(placed.tensors) if leaf in placed.donated
    ]


def _donations(lowered: Lowered, donated: Sequence[int]) -> dict[int, int]:
    """Output position -> placeholder position of a donated input with the same local layout.

    An output that lies in an input's memory already is written nowhere: another output might be
    written over it first.
    """
    free, program = list(donated), lowered.program
    holders = program.graph.find_nodes(op="placeholder")
    results = program.graph.find_nodes(op="output")[0].args[0]
    made_of = [memory_of(node) for node in results]
    free = [i for i in free if holders[i] not in made_of]
    pairs: dict[int, int] = {}
    for o, node in enumerate(results):
        match = next((i for i in free if _alike(holders[i], node)), None)
        if (
            match is not None
            and made_of[o] not in holders
            and made_of.index(made_of[o]) == o
        ):
            pairs[o] = match
            free.remove(match)
    return pairs


def _alike(a: torch.fx.Node, b: torch.fx.Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return (x.shape, x.stride(), x.dtype, x.device) == (
        y.shape,
        y.stride(),
        y.dtype,
        y.device,
    )
