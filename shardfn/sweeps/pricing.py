"""The predicted cost of a step on one mesh, with one layout. The step is lowered in a fake world,
and never runs. For a pipeline, each figure is the largest over the ranks of the pipeline axis.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from ..compile.kernel_times import kernel_seconds
from ..compile.memory import memory_as_run
from ..errors import PlacementError, ScheduleError, ShardError
from ..hardware import Hardware
from ..inspect.step_time import step_times
from ..mesh import make_mesh
from ..pipelines import Schedule
from ..progress import progress
from ..runtime.arguments import donated_places
from ..runtime.stages import Lowered
from ..transforms.sharding._auto import choose, is_auto
from ..transforms.sharding._shard import shard
from ..types import MeshAxes
from ..world import fake_world, world_set_aside
from .calls import call_text
from .layouts import Layout, Placed
from .table import Refused, Row, sent_bytes
from .variants import PLACES, Variant, programs_of, refuse_other_schedule


@attrs.frozen(eq=False)
class Candidate:
    """A variant of a step on a mesh in a layout.

    Args:
        where: the function, for errors.
        name: of the step.
        args: of the step.
        variant: the step.
        axes: of the mesh.
        layout: of the arguments.
        limit: bytes that a rank may hold; None for those of the hardware.
    """

    where: str
    name: str
    args: tuple[Any, ...]
    variant: Variant
    axes: MeshAxes
    layout: Layout
    limit: int | None

    def row(self, hardware: Hardware, known: Lowered | None) -> tuple[Row, Lowered | None]:
        """Price the step on some hardware.

        Args:
            hardware: the model.
            known: the lowered step, if it is the same on all hardware.

        Returns:
            The row; and the lowered step, unless its placements are chosen for this hardware.

        Raises:
            PlacementError: the layout does not fit the mesh, or nothing fits in the memory.
            ScheduleError: the step does not run by its schedule.
        """
        with world_set_aside(), fake_world(math.prod(self.axes.sizes), numerics=False):
            mesh = make_mesh(self.axes.sizes, self.axes.names)
            placed = self._placed(mesh)
            lowered = known or self._lowered(mesh, placed, hardware)
            row = self._row(lowered, placed, hardware)
        return row, None if is_auto(placed.in_placements) else lowered

    def _placed(self, mesh: Any) -> Placed:
        """Place the arguments on the mesh.

        Raises:
            PlacementError: stages are to be chosen.
        """
        schedule = self.variant.schedule
        placed = self.layout.of(mesh, schedule)
        if schedule is not None and is_auto(placed.in_placements):
            raise PlacementError.of(
                f"{self.where}, in_placements",
                "sf.auto does not choose stages",
                needed="the placements of all arguments, or a function of (mesh, schedule)",
                fix=f"in_placements={PLACES}",
                arg_path="in_placements",
            )
        return placed

    def _lowered(self, mesh: Any, placed: Placed, hardware: Hardware) -> Lowered:
        """Lower the step. Placements that are free are those that are best for the hardware."""
        sharded = shard(
            self.variant.fn, mesh, placed.in_placements, backend="inductor", **placed.options
        )
        if is_auto(placed.in_placements):
            sharded = choose(sharded, self.args, {}, self.limit, hardware).fn
        return sharded.lower(*self.args)

    def _row(self, lowered: Lowered, placed: Placed, hardware: Hardware) -> Row:
        """Find the figures of the coordinate where each is the most."""
        programs = programs_of(lowered)
        axis = lowered.partition.stage_axis
        schedule = self.variant.schedule
        if schedule is not None:
            refuse_other_schedule(self.where, programs if axis is not None else [], schedule)
        donated = donated_places(lowered.traced.placed)
        memories = [memory_as_run(x, "inductor", donated) for x in programs]
        peaks: list[Callable[[], float]] = [lambda peak=x.peak: peak for x in memories]
        whole = lowered.traced.program.graph.graph
        times = step_times(programs, hardware, None, peaks, axis, kernel_seconds, whole)
        sent = [x.collectives for x in programs]
        fullest = max(range(len(programs)), key=lambda k: memories[k].peak)
        slowest = max(times, key=lambda time: time.total)
        total = sum(time.total for time in times)
        computing = sum(time.mfu * time.total for time in times)
        places = lowered.placements
        chosen = attrs.evolve(placed, in_placements=places.in_placements)
        options = self.variant.options
        return Row(
            axes=self.axes,
            strategy=self.layout.name,
            options=options,
            time=slowest,
            mfu=computing / (len(times) * slowest.total) if total else 0.0,
            memory=memories[fullest],
            collectives=max(sent, key=functools.partial(sent_bytes, axes=self.axes)),
            placements=places,
            idle=sum(time.bubble for time in times) / total if total else 0.0,
            fullest="" if axis is None else f" on {self.axes.names[axis]}={fullest}",
            limit=hardware.capacity if self.limit is None else self.limit,
            call=call_text(self.name, self.axes, options, places.text(), placed.options),
            again=functools.partial(self._again, chosen),
        )

    def _again(self, placed: Placed) -> Lowered:
        """Lower the step of a row again, in a world of its own."""
        with world_set_aside(), fake_world(math.prod(self.axes.sizes), numerics=False):
            mesh = make_mesh(self.axes.sizes, self.axes.names)
            sharded = shard(
                self.variant.fn, mesh, placed.in_placements, backend="inductor", **placed.options
            )
            return sharded.lower(*self.args)


def candidates_of(
    where: str,
    name: str,
    args: tuple[Any, ...],
    meshes: Sequence[MeshAxes],
    variants: Sequence[Variant],
    layouts: Sequence[Layout],
    limit: int | None,
    axis: str,
) -> list[Candidate]:
    """Combine meshes, variants and layouts: a schedule with the meshes whose `axis` has as many
    coordinates.

    Raises:
        ScheduleError: a mesh or a schedule is in no pair.
    """
    schedules = list(dict.fromkeys(x.schedule for x in variants if x.schedule is not None))
    pairs = _pairs(where, meshes, schedules, axis) if schedules else None
    return [
        Candidate(where, name, args, variant, axes, layout, limit)
        for axes in meshes
        for variant in variants
        for layout in layouts
        if pairs is None or (axes, variant.schedule) in pairs
    ]


def _pairs(
    where: str, meshes: Sequence[MeshAxes], schedules: Sequence[Schedule], axis: str
) -> set[tuple[MeshAxes, Schedule | None]]:
    """Pair each mesh with the schedules of as many coordinates.

    Raises:
        ScheduleError: lists the meshes and the schedules that are in no pair.
    """
    sizes = {axes: dict(zip(axes.names, axes.sizes, strict=True)).get(axis) for axes in meshes}
    counts = {x.coordinates for x in schedules}
    wrong = [f"{axes} has no axis {axis!r}" for axes, size in sizes.items() if size is None]
    wrong += [
        f"{axes}: no schedule is for {size} pipeline ranks"
        for axes, size in sizes.items()
        if size is not None and size not in counts
    ]
    wrong += [
        f"{x.name} is for {x.coordinates} pipeline ranks, but no mesh has {axis}={x.coordinates}"
        for x in schedules
        if x.coordinates not in sizes.values()
    ]
    if wrong:
        raise ScheduleError.of(
            f"{where}, pipelines",
            *wrong,
            needed=f"for each schedule, a mesh whose axis {axis!r} has as many ranks as the "
            "schedule",
            fix=f"meshes=[{{{axis!r}: 4, 'dp': 2}}], pipelines=[sf.schedules.gpipe(4, 8)]",
        )
    return {(a, x) for a in meshes for x in schedules if x.coordinates == sizes[a]}


def priced(
    candidates: Sequence[Candidate],
    every: Sequence[Hardware],
    is_refusal: Callable[[ShardError], bool],
    check: Callable[[Row], None] = lambda row: None,
) -> tuple[list[Row], list[tuple[Refused, ShardError]]]:
    """Price each candidate on each hardware. What is warned of belongs to its row.

    Args:
        candidates: of the sweep.
        every: the models of hardware.
        is_refusal: whether an error says that a candidate cannot be. Others are raised.
        check: raises for a row that is not wanted.

    Returns:
        The rows, and the candidates that cannot be, with their errors.
    """
    rows: list[Row] = []
    refused: dict[tuple[int, str], tuple[Refused, ShardError]] = {}
    with progress("comparing") as show:
        for k, candidate in enumerate(candidates):
            show(f"{k + 1} of {len(candidates)}, {candidate.layout.name} on {candidate.axes}")
            known, warned = None, dict[str, None]()
            for hardware in every:
                try:
                    with warnings.catch_warnings(record=True) as caught:
                        warnings.simplefilter("always")
                        row, known = candidate.row(hardware, known)
                    warned |= dict.fromkeys(str(x.message) for x in caught)
                    check(row)
                    rows.append(attrs.evolve(row, warnings=tuple(warned)))
                except ShardError as error:
                    if not is_refusal(error):
                        raise
                    why, options = reason(error), candidate.variant.options
                    x = Refused(candidate.axes, candidate.layout.name, options, why)
                    refused.setdefault((k, why), (x, error))
    return rows, [*refused.values()]


def nothing_left(where: str, rows: Sequence[tuple[Refused, ShardError]], needed: str) -> ShardError:
    """Return the error of the only reason, or one that lists all.

    Args:
        where: the function, for errors.
        rows: what cannot be, with the errors.
        needed: a description of a right sweep.
    """
    first = rows[0][1]
    if len({x.why for x, _ in rows}) == 1:
        return first
    lines = [f"{', '.join(filter(None, x.cells().values()))}: {x.why}" for x, _ in rows]
    return type(first).of(where, *lines, needed=needed, fix=first.fix, arg_path=first.arg_path)


def is_over(error: ShardError) -> bool:
    """Return whether an error says that a step does not fit in the memory."""
    return isinstance(error, PlacementError) and error.arg_path == "memory"


def reason(error: ShardError) -> str:
    """Shorten an error to a line: what is wrong, or how much memory the least takes."""
    first, *others = str(error).split("\n")
    return others[0].strip() if is_over(error) and others else first
