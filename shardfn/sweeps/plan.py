"""`plan`: a sweep that finds the best mesh, placements or pipeline schedule for a function, within
the memory limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import _compat
from ..accepted import accept
from ..byte_sizes import human_bytes
from ..durations import human_seconds
from ..errors import PlacementError
from ..hardware import H100, Hardware, hardware_of
from ..pipelines import Schedule
from ..placement import AUTO
from ..tracebacks import filter_errors
from ..transforms._transformed import name_of
from ..transforms.sharding._auto import checked_memory
from .axes import MeshLike, axes_of_meshes
from .layouts import given
from .pricing import candidates_of, is_over, nothing_left, priced
from .table import Row, Sweep, sweep_of
from .variants import SCHEDULE, variants_of


@_compat.outside_only
@filter_errors
def plan(
    fn: Callable[..., Any],
    *args: Any,
    meshes: Sequence[MeshLike],
    memory: int | str | None = None,
    hardware: Hardware | str = H100,
    in_placements: Any = AUTO,
    axis_names: Sequence[str] | None = None,
    pipelines: Sequence[Schedule] | None = None,
    axis: str = "pp",
) -> Sweep:
    """Compare meshes of several shapes for the same step. For each mesh, `plan` shows the best
    placements, the step time, the bytes that a rank sends, and the memory peak of a rank.

    With `pipelines`, `plan` also compares pipeline schedules, each on the meshes whose pipeline
    axis has as many ranks as the schedule. With `pipelines`, `plan` calls `fn(*args,
    schedule=...)`, and fn must pass the schedule to `pipelined_grad`.

    `plan` captures the function once, or once for each schedule. `plan` runs no step and needs no
    ranks.

    Args:
        fn: a pure function of pytrees, as for `shard`.
        args: the positional arguments of the step. `ShapeDtype`s may stand for tensors.
        meshes: the shapes of the meshes. Each shape is a tuple of the numbers of ranks along the
            axes, or a dict of axis names and sizes.
        memory: the memory limit of a rank, in bytes or as text such as "80GiB".
        hardware: an `sf.Hardware`, or the name of one, such as "H100".
        in_placements: the placements that are already fixed: a prefix tree over the positional
            arguments, with `sf.auto` for the placements that `plan` chooses. With `pipelines`, all
            placements must be given, as a tree or as a function of (mesh, schedule).
        axis_names: the names of the mesh axes, as many as the largest mesh has axes. By default,
            the axes are named "dp", "cp" and "tp". With `pipelines`, the default axis names are the
            value of `axis`, "dp" and "tp".
        pipelines: the `sf.Schedule`s to compare, each of which has its own numbers of ranks, stages
            and microbatches. By default, no candidate of `plan` is a pipeline.
        axis: the pipeline axis of the mesh, as in `pipelined_grad`.

    Returns:
        An `sf.Sweep`, which prints as a table. The `rows` of the sweep are sorted by time, and each
        row has `time`, `memory`, `sent`, `placements`, and, with `pipelines`, `schedule` and
        `idle`. `Sweep.best` is the best row of the table. `Sweep.refused` lists the meshes and
        schedules for which the step does not fit into the memory limit.

    Raises:
        PlacementError: no placements fit into the memory limit on any mesh, or, with `pipelines`,
            placements are missing.
        ScheduleError: a pipeline schedule fits no mesh, a mesh fits no schedule, or the function
            does not use the schedule.
        ShardError: the hardware is unknown, or `memory` is not a number of bytes.

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
    accept("plan", fn=fn, meshes=meshes, axis_names=axis_names, axis=axis)
    name = name_of(fn)
    where = f"plan({name})"
    limit = checked_memory(where, memory, in_placements if pipelines is None else AUTO)
    model = hardware_of(hardware, where)
    variants = variants_of(where, fn, {SCHEDULE: pipelines})
    every = axes_of_meshes(where, meshes, axis_names, None if pipelines is None else axis)
    layout = given("", in_placements, args, {})
    candidates = candidates_of(where, name, args, every, variants, [layout], limit, axis)

    def check(row: Row) -> None:
        if limit is not None and row.excess:
            raise _does_not_fit(where, row)

    is_refusal = lambda error: limit is not None and is_over(error)
    rows, refused = priced(candidates, [model], is_refusal, check)
    if not rows:
        raise nothing_left(f"{where}, memory", refused, "a peak below the limit")
    return sweep_of(name, rows, [x for x, _ in refused])


def _does_not_fit(where: str, row: Row) -> PlacementError:
    """Return the error of a row whose peak is above the limit: of a schedule, as placements that
    are chosen fit.
    """
    schedule, limit = row.schedule, row.limit
    assert limit is not None and schedule is not None
    name = f"{schedule.name}, {schedule.microbatches} microbatches,"
    return PlacementError.of(
        f"{where}, memory",
        f"{name} do not fit in {human_bytes(int(limit))} per rank of {row.axes}",
        f"{human_bytes(row.peak)}{row.fullest}, {human_seconds(row.time.total)} a step",
        fix="use a schedule that keeps activations of fewer microbatches, or smaller microbatches",
        arg_path="memory",
    )
