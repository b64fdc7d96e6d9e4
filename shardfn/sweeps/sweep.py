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
    """Predict the time and memory of a step, for every combination of meshes, strategies, numbers
    of microbatches, policies of rematerialization and hardware, as one table.

    The step is captured once for all meshes, strategies and hardware. Microbatches, policies and
    schedules are part of its Python: it is called with `microbatches=`, `remat=` or `schedule=`,
    and captured once for each combination of these. Nothing runs, and no ranks are needed.

    Args:
        fn: a pure function of pytrees, as for `shard`. Strategies by name place its first
            argument, a dict, as parameters; trees of the same form and the state of an `sf.optim`
            as the state; all other tensors as the batch.
        args: its positional arguments; `ShapeDtype`s (global shape, dtype) may stand for tensors.
        meshes: the sizes of axes by name, `{"dp": 4, "tp": 2}`, or shapes.
        strategies: names of `sf.strategy`, several joined by + ("zero3+pipeline"), and "auto" for
            placements that are chosen. Or a dict of names and in_placements, or functions of the
            mesh that return them or an `sf.Strategy`; with `pipelines` of (mesh, schedule).
        microbatches: numbers that the step gives to `sf.accumulate`.
        remat: `checkpoint_policies` that the step gives to `sf.checkpoint`.
        pipelines: `sf.Schedule`s that the step gives to `sf.pipelined_grad`, each for the meshes
            whose `axis` has as many coordinates.
        hardware: `sf.Hardware`s, or names such as "H100".
        memory: the most that a rank may hold: bytes, or text such as "80GiB". Placements that are
            chosen keep to it, other rows above it are marked. By default the capacity of the
            hardware marks rows.
        axis_names: names of the axes of shapes; by default "dp", "cp" and "tp", and with
            `pipelines` `axis`, "dp" and "tp".
        axis: the mesh axis of the stages, as `pipelined_grad` names it.
        planner: as in `shard`; "greedy" takes a fraction of the time for a large step.

    Returns:
        A `Sweep`, which prints as a table and is drawn by `sf.draw`. Its `rows` stand the fastest
        first, those that do not fit last: with `time`, `peak`, `sent_by_axis`, `placements`,
        `is_front`, `call`, the text that makes the row, and `lowered()`. `front` are the rows that
        no other beats in both time and peak; `refused` says what cannot be, and why.

    Raises:
        ShardError: a list that is empty or has wrong values, unknown hardware, a step that does not
            take a keyword; or every combination is refused, with the reasons.
        PlacementError: an unknown strategy.
        ScheduleError: a schedule that fits no mesh.

    Source: the Pareto front of step time and memory, as AutoParallel and Alpa (Zheng et al. 2022)
        rank plans.

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
            needed="a list of sf.Hardwares or names",
            fix="hardware=['H100', 'H200']",
        )
    models = [hardware_of(x, f"{where}, hardware") for x in hardware]
    choices = {MICROBATCHES: microbatches, REMAT: remat, SCHEDULE: pipelines}
    if microbatches is not None and pipelines is not None:
        raise ShardError.of(
            f"{where}, microbatches",
            "a schedule has a number of microbatches of its own",
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
