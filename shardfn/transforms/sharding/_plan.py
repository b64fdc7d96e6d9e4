"""plan: meshes of several shapes compared, each with the placements that are best on it, and
schedules of a pipeline.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ... import _compat
from ...accepted import accept
from ...errors import PlacementError
from ...hardware import H100, Hardware, hardware_of
from ...inspect.mesh_plans import MeshPlan, MeshPlans
from ...mesh import make_mesh
from ...pipelines import Schedule
from ...placement import AUTO
from ...tracebacks import filter_errors
from ...types import MeshAxes
from ...world import fake_world, world_set_aside
from .._transformed import name_of
from . import _plan_pipelines as pipelined
from ._auto import checked_memory, choose
from ._shard import shard

NAMES = {1: ("dp",), 2: ("dp", "tp"), 3: ("dp", "cp", "tp")}


@_compat.outside_only
@filter_errors
def plan(
    fn: Callable[..., Any],
    *args: Any,
    meshes: Sequence[tuple[int, ...]],
    memory: int | str | None = None,
    hardware: Hardware | str = H100,
    in_placements: Any = AUTO,
    axis_names: Sequence[str] | None = None,
    pipelines: Sequence[Schedule] | None = None,
) -> MeshPlans:
    """Compare meshes of several shapes for a function: the placements that are best on each, the
    time of a step, the bytes that a rank sends, and the peak of its memory.

    With `pipelines` it compares schedules: each on the meshes whose axis "pp" has as many
    coordinates. The function is then called as `fn(*args, schedule=...)`, and gives the schedule to
    `pipelined_grad`.

    The function is captured once, or once for each schedule. Nothing runs, and no ranks are needed.

    Args:
        fn: a pure function of pytrees, as for `shard`.
        args: its positional arguments; `ShapeDtype`s (global shape, dtype) may stand for tensors.
        meshes: shapes, each a tuple of the ranks along each axis.
        memory: the most that a rank may hold: bytes, or text such as "80GiB".
        hardware: an `sf.Hardware`, or its name, such as "H100".
        in_placements: what is known of the placements: a prefix tree over the positional
            arguments, with `sf.auto` where they are to be chosen. With `pipelines` all of them, or
            a function of (mesh, schedule) that returns them.
        axis_names: names of the axes of every mesh, as many as the longest has; by default
            "dp", "cp" and "tp". With `pipelines` "pp", "dp" and "tp".
        pipelines: `sf.Schedule`s, which say coordinates, stages and microbatches. None: no
            pipeline.

    Returns:
        `MeshPlans`, which print as a table: `plans`, the fastest first, with `time`, `memory`,
        `sent`, `placements`, and with `pipelines` `schedule` and `idle`; `best`; `refused`, the
        meshes on which nothing fits, and the schedules above the limit.

    Raises:
        PlacementError: nothing fits on any mesh; with `pipelines`, placements that are not given.
        ScheduleError: a schedule that fits no mesh, or a mesh that fits no schedule; a function
            that does not take the schedule, or does not run by it.
        ShardError: unknown hardware, a memory that is not a number of bytes.

    Source: Alpa (Zheng et al. 2022), torchtitan's AutoParallel.

    Example:
        >>> import torch, shardfn as sf
        >>> x = sf.ShapeDtype((1024, 256))
        >>> double = lambda x: x * 2
        >>> sf.plan(double, x, meshes=[(8,), (4, 2)]).best.placements.in_placements
        (P('dp'),)
        >>> def grad(w, x, schedule):
        ...     loss = lambda w, x: (x @ w[0] @ w[1]).square().mean()
        ...     return sf.pipelined_grad(loss, schedule.microbatches, schedule=schedule)(w, x)
        >>> w = [sf.ShapeDtype((256, 256)) for _ in range(2)]
        >>> two = [sf.schedules.gpipe(2, 4), sf.schedules.one_f_one_b(2, 4)]
        >>> places = [sf.P(pp=0), sf.P(pp=1)], None
        >>> found = sf.plan(grad, w, x, meshes=[(2,)], pipelines=two, in_placements=places)
        >>> found.best.schedule.name
        'one_f_one_b'
    """
    accept("plan", fn=fn, meshes=meshes, axis_names=axis_names)
    where = f"plan({name_of(fn)})"
    limit = checked_memory(where, memory, in_placements if pipelines is None else AUTO)
    model = hardware_of(hardware, where)
    given = fn, args, limit, model, in_placements
    if pipelines is None:
        every = _every_mesh(where, meshes, axis_names, NAMES)
        candidates = [(axes, functools.partial(_plan, axes, *given)) for axes in every]
    else:
        every = _every_mesh(where, meshes, axis_names, pipelined.NAMES)
        candidates = pipelined.candidates(where, every, pipelines, *given)
    plans = []
    refused = []
    for axes, price in candidates:
        try:
            with world_set_aside():
                plans.append(price())
        except PlacementError as error:
            if limit is None or error.arg_path != "memory":
                raise
            refused.append((axes, error))
    if not plans:
        raise _nothing_fits(where, refused)
    ordered = sorted(plans, key=lambda found: (found.time.total, found.memory.peak))
    problems = [(axes, _reason(error)) for axes, error in refused]
    return MeshPlans(name_of(fn), tuple(ordered), tuple(problems))


def _every_mesh(
    where: str,
    meshes: Sequence[tuple[int, ...]],
    axis_names: Sequence[str] | None,
    names: Mapping[int, tuple[str, ...]],
) -> list[MeshAxes]:
    """The axes of each mesh.

    Args:
        where: the function, for errors.
        meshes: their shapes.
        axis_names: of the user.
        names: in place of them, by the number of axes.
    """
    return [
        _axes(where, tuple(shape), tuple(axis_names or names.get(len(shape), ())))
        for shape in meshes
    ]


def _axes(where: str, shape: tuple[int, ...], names: tuple[str, ...]) -> MeshAxes:
    """The axes of one mesh.

    Raises:
        PlacementError: there are not as many names.
    """
    if len(names) < len(shape):
        raise PlacementError.of(
            f"{where}, axis_names",
            f"{len(names)} names for a mesh of shape {shape}",
            fix=f"axis_names with {len(shape)} names",
            arg_path="axis_names",
        )
    return MeshAxes(names[: len(shape)], shape)


def _plan(
    axes: MeshAxes,
    fn: Any,
    args: tuple[Any, ...],
    limit: int | None,
    hardware: Hardware,
    in_placements: Any,
) -> MeshPlan:
    """Find the best placements, time, bytes and memory on one candidate mesh."""
    with fake_world(math.prod(axes.sizes), numerics=False):
        mesh = make_mesh(axes.sizes, axes.names)
        sharded = shard(fn, mesh, in_placements, backend="inductor")
        found = choose(sharded, args, {}, limit, hardware)
        lowered = found.fn.lower(*args)
        return MeshPlan(
            axes, lowered.time(hardware), lowered.memory, lowered.collectives, lowered.placements
        )


def _nothing_fits(where: str, refused: Sequence[tuple[MeshAxes, PlacementError]]) -> PlacementError:
    """The error of the only mesh or schedule, or one that lists all."""
    if len(refused) == 1:
        return refused[0][1]
    rows = [f"{axes}: {_reason(error)}" for axes, error in refused]
    return PlacementError.of(
        f"{where}, memory", *rows, needed="a peak below the limit", arg_path="memory"
    )


def _reason(error: PlacementError) -> str:
    """Shorten the error of a mesh on which nothing fits to one line of the table."""
    lines = str(error).split("\n")
    return lines[1].strip() if len(lines) > 1 else lines[0]
