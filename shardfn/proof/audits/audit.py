"""`audit`: is a distributed training step what it is on one device?"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from ...accepted import accept
from ...errors import DivergenceError, TreeError
from ...ranks import process_state
from ...ranks.run_ranks import Ranks
from .audited import RANDOM, Audit, Comparison
from .causes import OTHER, Axis, tolerance
from .forwards import AGREED, departure
from .observed import Observed
from .other_roundings import RUNS, Rounding, narrow_eps, otherwise
from .watched_runs import watched, watched_scripts, watched_steps

WORLD = 8
UNNAMED = {"axis 0"}  # of a mesh without names


def audit(
    distributed: Any,
    single: Any,
    *args: Any,
    world: int | None = None,
    mesh: Mapping[str, int] | None = None,
    steps: int | None = None,
) -> Audit:
    """Compare a training step that is written for torch.distributed with the same step on one
    device.

    The distributed step runs unchanged, on simulated ranks that are threads of this process. The
    distributed step may use DistributedDataParallel, fully_shard, parallelize_module, DTensors, or
    hand-written collectives. Each rank gets a copy of the arguments, and must select its part of
    them by `dist.get_rank()`. All ranks start with the same state of the random generators.
    Parameters of the two steps are paired by name, or by their initial values. In the distributed
    step, a rank may hold only a part of a parameter.

    The audit compares the gradients when the optimizer reads them (without an optimizer, at the end
    of the step), the parameters after each step, the buffers, and the results of the steps. A step
    may return losses, modules, optimizers, tensors, or trees of them. The audit also compares the
    modules, losses and optimizers that the step uses but does not return. If a step returns a loss
    and runs no backward, the audit differentiates the loss.

    Args:
        distributed: the step function that each rank runs, a module, or the path of a script for
            torchrun. A step function with a parameter `mesh` gets a DeviceMesh.
        single: the step function for one device and the global batch, or the path of a script.
            Without `single`, the distributed step or script also runs on one rank, where data
            loaders with a DistributedSampler return the batches of all ranks.
        args: the arguments of both steps. For scripts, `args` are the command-line arguments.
        world: the number of ranks; by default, the size of the mesh, or 8.
        mesh: the sizes of the mesh axes by name, for error messages and for a step that has a
            parameter `mesh`.
        steps: the number of optimizer steps to compare; by default, all steps.

    Returns:
        An `Audit`, which lists the values that differ between the two steps, each with the ratio of
        both values, the ranks and the probable cause.

    Raises:
        ShardError: an argument has a wrong type. The message lists all arguments with a wrong type.
        TreeError: the number `world` differs from the number of ranks of `mesh`, or a step computes
            no value that can be compared.
        DivergenceError: ranks deadlock, or call different collectives.

    Source: the public bug reports that docs/audit.md lists.

    Example:
        >>> import torch.distributed as dist
        >>> def single(x):
        ...     torch.manual_seed(0)
        ...     model = torch.nn.Linear(3, 1)
        ...     model(x).mean().backward()
        ...     return model
        >>> def distributed(x):
        ...     torch.manual_seed(0)
        ...     model = torch.nn.Linear(3, 1)
        ...     model(x.chunk(2)[dist.get_rank()]).mean().backward()
        ...     dist.all_reduce(model.bias.grad, dist.ReduceOp.AVG)
        ...     return model
        >>> print(audit(distributed, single, torch.arange(12.0).view(4, 3), world=2))
        1 of 6 values of distributed on 2 ranks differ from those of one device
          gradient of weight: each rank its own: not reduced over world (differs by 3, ranks 0, 1)
    """
    accept("audit", distributed=distributed, single=single, world=world, mesh=mesh, steps=steps)
    step = _name(distributed)
    world = world or (math.prod(mesh.values()) if mesh else WORLD)
    axes = _axes_of_mesh(f"audit({step})", mesh, world)
    starts = process_state.generators()
    name = f"audit({step})"

    is_script = isinstance(distributed, str)

    def run(steps: int | None, *, keeps_calls: bool = False) -> Any:
        if is_script:
            return watched_scripts(distributed, single, args, world, mesh, steps, keeps_calls)
        return watched_steps(
            name, distributed, single, args, world, starts, mesh, steps, keeps_calls
        )

    run_alone, seen, ranks = run(steps)
    alone = run_alone(contextlib.nullcontext)
    groups = _axes(axes, seen, ranks)
    rounding = None
    if (eps := narrow_eps([alone, seen[0]])) is not None:
        runs = [run_alone(otherwise(eps, seed)) for seed in range(RUNS)]
        rounding = Rounding(alone, runs, eps)
    comparison = Comparison(name, alone, seen, groups, rounding)
    found = comparison.audit(step)
    others = [row for row in found if row.cause == OTHER]
    if others and not is_script:
        _same_loss(name, distributed, args, alone, starts, mesh, eps or 0.0)
    if RANDOM in found.notes or not any(row.step == 0 for row in others):
        return found
    run_alone, seen, _ = run(1, keeps_calls=True)
    calls = run_alone(contextlib.nullcontext).calls_by_path()
    where = departure(calls, [each.calls_by_path() for each in seen], groups, eps or 0.0)
    if where is None or (where == AGREED and comparison.has_right_loss(0) is not False):
        return found
    return attrs.evolve(found, notes=(*found.notes, where))


def _same_loss(
    name: str,
    distributed: Any,
    args: tuple[Any, ...],
    alone: Observed,
    starts: Mapping[str, Any],
    mesh: Mapping[str, int] | None,
    eps: float,
) -> None:
    """Refuse a single-device step with another loss than that of the ranks' step on one rank."""
    try:
        (one,), _ = watched(name, distributed, args, 1, starts, dict.fromkeys(mesh or (), 1), 1)
    except Exception:  # a step that needs its number of ranks
        return
    of_alone, of_one = ([float(x.value.value) for x in s.losses_of(0)] for s in (alone, one))
    if not of_alone or len(of_alone) != len(of_one):
        return  # microbatches may have other losses, as with statistics of a batch
    bound = max(4 * tolerance(alone.losses[0].value.value.dtype), 16 * eps)
    if abs(sum(of_alone) - sum(of_one)) > bound * abs(sum(of_alone)):
        raise DivergenceError.of(
            name,
            f"the single-device step has the loss {of_alone[0]:.6g}, but the distributed step on "
            f"one rank has {of_one[0]:.6g}",
            needed="two steps with the same loss",
            fix="compute the same loss, with the same reduction, on the whole batch",
        )


def _name(step: Any) -> str:
    if isinstance(step, str):
        return Path(step).name
    return getattr(step, "__name__", type(step).__name__)


def _axes_of_mesh(name: str, mesh: Mapping[str, int] | None, world: int) -> list[Axis]:
    """Return the axes of the mesh of the caller."""
    if mesh is None:
        return []
    sizes = tuple(mesh.values())
    if torch.Size(sizes).numel() != world:
        raise TreeError.of(
            name,
            f"mesh {dict(mesh)} has {torch.Size(sizes).numel()} ranks, but world is {world}",
            needed="sizes whose product is the number of ranks",
            fix=f"world={torch.Size(sizes).numel()}",
            arg_path="mesh",
        )
    ranks = torch.arange(world).view(sizes)
    return [
        Axis(axis, tuple(map(tuple, ranks.movedim(i, -1).reshape(-1, n).tolist())))
        for i, (axis, n) in enumerate(mesh.items())
    ]


def _axes(of_mesh: list[Axis], seen: Sequence[Observed], ranks: Ranks) -> list[Axis]:
    """Return the groups of ranks: of the caller's mesh, of DTensors, of process groups, and all."""
    groups: dict[str, dict[tuple[int, ...], None]] = {}
    for each in seen:
        for axis, group in each.axes.items():
            if axis not in UNNAMED or len(group) < ranks.n:
                groups.setdefault(axis, {})[group] = None
    for about, group in ranks.groups.values():
        axis = about.removeprefix("mesh_") if about.startswith("mesh_") else None
        if len(group) < ranks.n:
            groups.setdefault(axis or "a process group", {})[group] = None
        elif axis:
            groups.setdefault(axis, {})[group] = None
    found = [*of_mesh]
    known = {axis.name for axis in found}
    found += [Axis(name, tuple(rows)) for name, rows in groups.items() if name not in known]
    found = [axis for axis in found if axis.size > 1]
    named = {axis.groups for axis in found if axis.name != "a process group"}
    found = [a for a in found if a.name != "a process group" or a.groups not in named]
    everything = (tuple(range(ranks.n)),)
    return (
        found if any(a.groups == everything for a in found) else [*found, Axis("world", everything)]
    )
