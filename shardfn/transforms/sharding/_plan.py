"""plan: meshes of several shapes compared, each with the placements that are best on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ... import _compat
from ...accepted import accept
from ...errors import PlacementError
from ...hardware import H100, Hardware, hardware_of
from ...inspect.mesh_plans import MeshPlan, MeshPlans
from ...mesh import make_mesh
from ...placement import AUTO
from ...tracebacks import filter_errors
from ...types import MeshAxes
from ...world import fake_world, world_set_aside
from .._transformed import name_of
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
) -> MeshPlans:
    """Compare meshes of several shapes for a function: the placements that are best on each, the
    time of a step, the bytes that a rank sends, and the peak of its memory.

    The function is captured once. Nothing runs, and no ranks are needed.

    Args:
        fn: a pure function of pytrees, as for `shard`.
        args: its positional arguments; `ShapeDtype`s (global shape, dtype) may stand for tensors.
        meshes: shapes, each a tuple of the ranks along each axis.
        memory: the most that a rank may hold: bytes, or text such as "80GiB".
        hardware: an `sf.Hardware`, or "A100", "H100", "H200" or "B200".
        in_placements: what is known of the placements: a prefix tree over the positional
            arguments, with `sf.auto` where they are to be chosen.
        axis_names: names of the axes of every mesh, as many as the longest has; by default
            "dp", "cp" and "tp".

    Returns:
        `MeshPlans`, which print as a table: `plans`, the fastest first, with `time`, `memory`,
        `sent` and `placements`; `best`; `refused`, the meshes on which nothing fits.

    Raises:
        PlacementError: nothing fits on any mesh.
        ShardError: unknown hardware, a memory that is not a number of bytes.

    Source: Alpa (Zheng et al. 2022), torchtitan's AutoParallel.

    Example:
        >>> import torch, shardfn as sf
        >>> x = sf.ShapeDtype((1024, 256))
        >>> double = lambda x: x * 2
        >>> sf.plan(double, x, meshes=[(8,), (4, 2)]).best.placements.in_placements
        (P('dp'),)
    """
    accept("plan", fn=fn, meshes=meshes, axis_names=axis_names)
    where = f"plan({name_of(fn)})"
    limit = checked_memory(where, memory, in_placements)
    model = hardware_of(hardware, where)
    plans = []
    refused = []
    for shape in meshes:
        names = axis_names or NAMES.get(len(shape), ())
        axes = _axes(where, tuple(shape), tuple(names))
        try:
            with world_set_aside():
                plans.append(_plan(fn, args, axes, limit, model, in_placements))
        except PlacementError as error:
            if limit is None or error.arg_path != "memory":
                raise
            refused.append((axes, error))
    if not plans:
        _, first = refused[0]
        raise first
    ordered = sorted(plans, key=lambda found: found.time.total)
    problems = [(axes, _reason(error)) for axes, error in refused]
    return MeshPlans(name_of(fn), tuple(ordered), tuple(problems))


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
    fn: Any,
    args: tuple[Any, ...],
    axes: MeshAxes,
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


def _reason(error: PlacementError) -> str:
    """Shorten the error of a mesh on which nothing fits to one line of the table."""
    lines = str(error).split("\n")
    return lines[1].strip() if len(lines) > 1 else lines[0]
