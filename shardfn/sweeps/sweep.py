"""`sweep`: one step on several meshes, in several layouts and variants, on several kinds of
hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import _compat
from ..accepted import accept, described
from ..errors import CaptureError, ShardError
from ..hardware import Hardware, hardware_of
from ..pipelines import Schedule
from ..placement import AUTO
from ..tracebacks import filter_errors
from ..transforms._transformed import name_of
from ..transforms.sharding._auto import checked_memory
from .axes import MeshLike, axes_of_meshes
from .layouts import layouts_of
from .pricing import candidates_of, nothing_left, priced
from .table import Sweep, sweep_of
from .variants import MICROBATCHES, REMAT, SCHEDULE, is_list, variants_of


@_compat.outside_only
@filter_errors
def sweep(
    fn: Callable[..., Any],
    *args: Any,
    meshes: Sequence[MeshLike],
    strategies: Sequence[str] | Mapping[str, Any] = ("auto",),
    microbatches: Sequence[int] | None = None,
    remat: Sequence[str] | None = None,
    pipelines: Sequence[Schedule] | None = None,
    hardware: Sequence[Hardware | str] = ("H100",),
    memory: int | str | None = None,
    axis_names: Sequence[str] | None = None,
    axis: str = "pp",
    planner: str = "global",
) -> Sweep:
    """Predict the time and memory of a step for every combination of meshes, strategies,
    microbatches, rematerialization policies and hardware.

    `sweep` captures the step once for each combination of microbatches, policies and schedules, and
    uses the capture for all meshes, strategies and hardware. `sweep` passes each choice to the step
    by keyword: `microbatches=`, `remat=` and `schedule=`. `sweep` runs no step and needs no ranks.

    Args:
        fn: a pure function of pytrees, as for `shard`. For a strategy given by its name, the first
            argument of fn must be the dict of parameters. Trees with the structure of the
            parameters, and the state of an `sf.optim`, get the placements of the optimizer state.
            Tensors that are neither parameters nor optimizer state get the placements of the batch.
        args: the positional arguments of the step. `ShapeDtype`s (global shape, dtype) may stand
            for tensors.
        meshes: the meshes: dicts of axis names and sizes, such as `{"dp": 4, "tp": 2}`, or tuples
            of sizes.
        strategies: names of `sf.strategy`, several joined by + ("zero3+pipeline"), and "auto" for
            placements that shardfn chooses. `strategies` may also be a dict from names to
            in_placements, or to functions of the mesh that return in_placements or an
            `sf.Strategy`. With `pipelines`, a dict of strategies maps names to functions of (mesh,
            schedule).
        microbatches: a list of numbers of microbatches, which the step passes to `sf.accumulate`.
        remat: a list of rematerialization policies, which the step passes to `sf.checkpoint`.
        pipelines: a list of `sf.Schedule`s, which the step passes to `sf.pipelined_grad`. `sweep`
            tries each schedule on the meshes whose pipeline axis has as many ranks as the schedule.
        hardware: a list of `sf.Hardware`, or of names such as "H100".
        memory: the memory limit of a rank, in bytes or as text such as "80GiB". The placements that
            shardfn chooses stay below the memory limit. If placements that you give exceed the
            memory limit, the table marks their row. By default, the table marks rows that exceed
            the memory capacity of the hardware.
        axis_names: the names of the axes, for meshes that are given as tuples of sizes. The default
            axis names are those of `sf.plan`.
        axis: the pipeline axis of the mesh, as in `pipelined_grad`.
        planner: the planner, as in `shard`. For a large step, `planner="greedy"` takes much less
            time than the default planner.

    Returns:
        A `Sweep`, which prints as a table and which `sf.draw` draws. The `rows` of the sweep are
        sorted by time, and rows that do not fit in memory come last. Each row of a sweep has the
        fields `time`, `peak`, `sent_by_axis`, `placements`, `is_front` and `call` (the code that
        runs the row), and the method `lowered()`. `Sweep.front` lists the rows on the Pareto front
        of time and memory peak, for each hardware. `Sweep.refused` lists the combinations that
        cannot run, each with the reason.

    Raises:
        ShardError: a list is empty or has wrong values, the hardware is unknown, the step lacks a
            keyword parameter, or no combination can run (the message gives the reasons).
        PlacementError: `sf.strategy` has no strategy of the given name.
        ScheduleError: a pipeline schedule fits none of the meshes.

    Source: AutoParallel and Alpa (Zheng et al. 2022), which rank parallel plans; the Pareto front
        of step time and memory.

    Example:
        >>> import shardfn as sf
        >>> def step(w, x, *, microbatches):
        ...     loss = lambda w, x: (x @ w["up"]).square().mean()
        ...     return sf.accumulate(sf.value_and_grad(loss), microbatches)(w, x)
        >>> shapes = {"up": sf.ShapeDtype((4096, 4096))}, sf.ShapeDtype((8192, 4096))
        >>> found = sf.sweep(
        ...     step, *shapes, meshes=[{"dp": 8}], strategies=["ddp", "zero3"], microbatches=[1, 2]
        ... )
        >>> len(found.rows), found.best.strategy, found.best.is_front
        (4, 'zero3', True)
    """
    accept("sweep", fn=fn, meshes=meshes, axis_names=axis_names, axis=axis)
    where = f"sweep({name_of(fn)})"
    limit = checked_memory(where, memory, AUTO)
    if not is_list(hardware):
        raise ShardError.of(
            f"{where}, hardware",
            f"it is {described(hardware)}",
            needed="a list of sf.Hardware or of names of devices",
            fix="hardware=['H100', 'H200']",
        )
    models = [hardware_of(x, f"{where}, hardware") for x in hardware]
    choices = {MICROBATCHES: microbatches, REMAT: remat, SCHEDULE: pipelines}
    if microbatches is not None and pipelines is not None:
        raise ShardError.of(
            f"{where}, microbatches",
            "microbatches= and pipelines= are both given, but a schedule sets the microbatches",
            needed="either microbatches= or pipelines=",
            fix="pipelines=[sf.schedules.one_f_one_b(4, m) for m in (8, 16)]",
        )
    variants = variants_of(where, fn, choices)
    options = {} if planner == "global" else {"planner": planner}
    layouts = layouts_of(where, strategies, args, options, axis)
    every = axes_of_meshes(where, meshes, axis_names, None if pipelines is None else axis)
    candidates = candidates_of(where, name_of(fn), args, every, variants, layouts, limit, axis)
    rows, refused = priced(candidates, models, lambda error: not isinstance(error, CaptureError))
    if not rows:
        raise nothing_left(where, refused, "a combination that can be")
    return sweep_of(name_of(fn), rows, [x for x, _ in refused])
