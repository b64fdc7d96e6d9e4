"""The part of `plan` that compares schedules of a pipeline: which fits which mesh, and what a step
by each takes on the coordinate where it takes the most.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from ...accepted import described
from ...byte_sizes import human_bytes
from ...compile.kernel_times import kernel_seconds
from ...compile.memory import memory_as_run
from ...durations import human_seconds
from ...errors import PlacementError, ScheduleError
from ...hardware import Hardware
from ...inspect.mesh_plans import MeshPlan, sent_bytes
from ...inspect.step_time import step_times
from ...mesh import make_mesh
from ...ops.pipeline import Pipeline
from ...partition.collective_bytes import collectives_in
from ...pipelines import Schedule
from ...runtime.arguments import donated_places
from ...types import LocalProgram, MeshAxes
from ...world import fake_world
from .._transformed import name_of
from ._auto import is_auto
from ._shard import shard

AXIS = "pp"  # of the stages, as pipelined_grad names it
NAMES = {n: (AXIS, "dp", "tp")[:n] for n in (1, 2, 3)}
STEP = (
    "def step(params, batch, *, schedule): "
    "sf.pipelined_grad(loss, schedule.microbatches, schedule=schedule)(params, batch)"
)
PLACES = "lambda mesh, schedule: (sf.strategy('pipeline', params, mesh).params, None)"


def candidates(
    where: str,
    meshes: Sequence[MeshAxes],
    pipelines: Sequence[Schedule],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    limit: int | None,
    hardware: Hardware,
    in_placements: Any,
) -> list[tuple[MeshAxes, Callable[[], MeshPlan]]]:
    """Pair each mesh with the schedules of as many coordinates: a function for each pair, which
    finds its price.

    Raises:
        ScheduleError: pipelines is not a list of schedules, or one is in no pair; the function does
            not take one.
    """
    _check(where, fn, pipelines)
    given = args, limit, hardware, in_placements
    steps = {x: _with_schedule(fn, x) for x in pipelines}
    return [
        (axes, functools.partial(_plan, where, steps[x], x, axes, *given))
        for axes, x in _pairs(where, meshes, pipelines)
    ]


def _check(where: str, fn: Callable[..., Any], pipelines: Any) -> None:
    """Check the arguments of a comparison of schedules.

    Raises:
        ScheduleError: pipelines is not a list of schedules; the function does not take one.
    """
    is_list = isinstance(pipelines, Sequence) and len(pipelines) > 0
    if not is_list or not all(isinstance(x, Schedule) for x in pipelines):
        raise ScheduleError.of(
            f"{where}, pipelines",
            f"it is {described(pipelines)}",
            needed="a list of sf.Schedules",
            fix="pipelines=[sf.schedules.gpipe(4, 8), sf.schedules.one_f_one_b(4, 8)]",
        )
    if not _takes_schedule(fn):
        raise ScheduleError.of(
            f"{where}, fn",
            "it takes no schedule",
            needed="a function of its arguments and of schedule=, which it gives to pipelined_grad",
            fix=STEP,
        )


def _placements(where: str, given: Any, mesh: Any, schedule: Schedule) -> Any:
    """The placements of the arguments on a mesh.

    Raises:
        PlacementError: they are to be chosen.
    """
    places = given(mesh, schedule) if callable(given) else given
    if not is_auto(places):
        return places
    raise PlacementError.of(
        f"{where}, in_placements",
        "sf.auto, which does not choose stages",
        needed="the placements of all arguments, or a function of (mesh, schedule)",
        fix=f"in_placements={PLACES}",
        arg_path="in_placements",
    )


def _takes_schedule(fn: Callable[..., Any]) -> bool:
    """Whether a function can be called with `schedule=`."""
    parameters = inspect.signature(fn).parameters.values()
    named = [x for x in parameters if x.name == "schedule" and x.kind is not x.POSITIONAL_ONLY]
    return bool(named) or any(x.kind is x.VAR_KEYWORD for x in parameters)


def _with_schedule(fn: Callable[..., Any], schedule: Schedule) -> Callable[..., Any]:
    """A function without its parameter schedule: one that carries its capture for all meshes."""

    def step(*args: Any) -> Any:
        return fn(*args, schedule=schedule)

    step.__name__ = name_of(fn)
    step.__signature__ = inspect.signature(functools.partial(fn, schedule=schedule))  # type: ignore[attr-defined]
    return step


def _pairs(
    where: str, meshes: Sequence[MeshAxes], pipelines: Sequence[Schedule]
) -> list[tuple[MeshAxes, Schedule]]:
    """Pair each mesh with the schedules of as many coordinates.

    Raises:
        ScheduleError: lists the meshes and the schedules that are in no pair.
    """
    sizes = {axes: dict(zip(axes.names, axes.sizes, strict=True)).get(AXIS) for axes in meshes}
    counts = {x.coordinates for x in pipelines}
    wrong = [f"{axes} has no axis {AXIS!r}" for axes, size in sizes.items() if size is None]
    wrong += [
        f"{axes}: no schedule has {size} coordinates"
        for axes, size in sizes.items()
        if size is not None and size not in counts
    ]
    wrong += [
        f"{x.name} has {x.coordinates} coordinates, and no mesh has {AXIS}={x.coordinates}"
        for x in pipelines
        if x.coordinates not in sizes.values()
    ]
    if wrong:
        raise ScheduleError.of(
            f"{where}, pipelines",
            *wrong,
            needed=f"for each schedule a mesh whose axis {AXIS!r} has as many coordinates",
            fix="meshes=[(4, 2)], axis_names=('pp', 'dp'), pipelines=[sf.schedules.gpipe(4, 8)]",
        )
    return [(a, x) for a in meshes for x in pipelines if x.coordinates == sizes[a]]


def _plan(
    where: str,
    step: Callable[..., Any],
    schedule: Schedule,
    axes: MeshAxes,
    args: tuple[Any, ...],
    limit: int | None,
    hardware: Hardware,
    in_placements: Any,
) -> MeshPlan:
    """Lower a step that runs by a schedule, and find its time, bytes and memory: of each, on the
    coordinate where it is the most.

    Args:
        where: the function, for errors.
        step: the user's function, which has its schedule.
        schedule: of the step.
        axes: of the mesh.
        args: of the step.
        limit: bytes that a rank may hold.
        hardware: the model.
        in_placements: of the arguments, or a function of (mesh, schedule).

    Raises:
        PlacementError: placements are to be chosen; a coordinate holds more than the limit.
        ScheduleError: the step does not run by the schedule.
    """
    with fake_world(math.prod(axes.sizes), numerics=False):
        mesh = make_mesh(axes.sizes, axes.names)
        places = _placements(where, in_placements, mesh, schedule)
        lowered = shard(step, mesh, places, backend="inductor").lower(*args)
        coordinates = range(schedule.coordinates)
        is_on_stages = lowered.partition.stage_axis is not None
        programs = [lowered.stage(k) for k in coordinates] if is_on_stages else []
        _refuse_other(where, programs, schedule)
        donated = donated_places(lowered.traced.placed)
        memories = [memory_as_run(x, "inductor", donated) for x in programs]
        peaks = [lambda peak=held.peak: peak for held in memories]
        axis = lowered.partition.stage_axis
        times = step_times(programs, hardware, None, peaks, axis, kernel_seconds)
        sent = [tuple(collectives_in(x.graph)) for x in programs]
        fullest = max(coordinates, key=lambda k: memories[k].peak)
        slowest = max(times, key=lambda time: time.total)
        peak = memories[fullest].peak
        if limit is not None and peak > limit:
            title = f"{schedule.name}, {schedule.microbatches} microbatches"
            raise PlacementError.of(
                f"{where}, memory",
                f"{title}, do not fit in {human_bytes(limit)} a rank of {axes}",
                f"{title}: {human_bytes(peak)} on {AXIS}={fullest}, "
                f"{human_seconds(slowest.total)} a step",
                fix="a schedule that keeps fewer microbatches, or smaller ones",
                arg_path="memory",
            )
        idle = sum(time.bubble for time in times) / sum(time.total for time in times)
        busiest = max(sent, key=functools.partial(sent_bytes, axes=axes))
        return MeshPlan(
            axes, slowest, memories[fullest], busiest, lowered.placements, schedule, idle
        )


def _refuse_other(where: str, programs: Sequence[LocalProgram], schedule: Schedule) -> None:
    """Refuse a step that does not run by the schedule that it was called with.

    Raises:
        ScheduleError: it has no pipeline, or one of another schedule.
    """
    runs = [
        (k, node.target.actions())
        for k, program in enumerate(programs)
        for node in program.graph.nodes
        if isinstance(node.target, Pipeline)
    ]
    if not runs:
        raise ScheduleError.of(
            f"{where}, pipelines",
            f"nothing runs by {schedule.name}: no parameter is on a stage, or fn calls no "
            "pipelined_grad",
            fix=f"in_placements={PLACES}",
        )
    for k, actions in runs:
        table = map(tuple, schedule.table[k])  # actions in which nothing is computed do not run
        if not all((x.kind, x.stage, x.microbatch) in table for x in actions):
            raise ScheduleError.of(
                f"{where}, fn",
                f"it was called with {schedule.name}, and its pipelined_grad has another schedule",
                fix=STEP,
            )
