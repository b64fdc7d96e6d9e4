"""Runs of a step on n ranks, or on one device, and what is seen of each rank."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from ...progress import progress
from ...ranks import process_state
from ...ranks.process_state import ProcessState
from ...ranks.run_ranks import Ranks, run_ranks
from ...ranks.script import Script
from .hooks import observing
from .observed import Observed


def watched(
    name: str,
    step: Any,
    args: tuple[Any, ...],
    n: int,
    starts: Mapping[str, Any],
    mesh: Mapping[str, int] | None,
    steps: int | None,
    *,
    is_started: bool = True,
    keeps_calls: bool = False,
    around: Callable[[Observed], Any] = contextlib.nullcontext,
) -> tuple[list[Observed], Ranks]:
    """Run a step on n ranks, and watch each of them.

    Args:
        name: of the audit, for errors.
        step: the step of a rank.
        args: its arguments, of which each rank gets a copy.
        n: the number of ranks.
        starts: the states of random generators.
        mesh: the sizes of the axes of a mesh, for a step that takes one.
        steps: the optimizer steps after which it ends; None for all.
        is_started: whether ranks begin with a process group.
        keeps_calls: whether to keep what modules read and return.
        around: a context of each rank's run, made for what is seen of it.

    Returns:
        What is seen of each rank, and the ranks.
    """
    seen = [Observed(steps, keeps_calls=keeps_calls) for _ in range(n)]
    world: list[Ranks] = []
    own = threading.local()

    def each(ranks: Ranks) -> None:
        world.append(ranks)
        own.seen = seen[ranks.rank()]
        copies = copy.deepcopy(args)
        options = {}
        if mesh is not None and "mesh" in _parameters(step):
            options["mesh"] = init_device_mesh(
                "cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh)
            )
        with own.seen.until_enough_steps(), around(own.seen):
            own.seen.ends(_differentiated(own.seen, step(*copies, **options)))

    def rank() -> int | None:
        return world[0].turns.rank() if world else None

    is_script = isinstance(step, Script)
    installed = step.installed(rank) if is_script else contextlib.nullcontext()
    shown = progress(f"{name}: {'one device' if n == 1 else f'{n} ranks'}")
    with shown as seen[0].show, observing(lambda: getattr(own, "seen", None)), installed:
        run_ranks(
            each,
            n,
            name=name,
            generators=starts,
            is_started=is_started,
            state=step.state if is_script else ProcessState,
            is_over=lambda: any(each.is_enough for each in seen),
        )
    return seen, world[0]


Alone = Callable[[Callable[[Observed], Any]], Observed]  # runs one device in a context


def watched_steps(
    name: str,
    distributed: Any,
    single: Any,
    args: tuple[Any, ...],
    world: int,
    starts: Mapping[str, Any],
    mesh: Mapping[str, int] | None,
    steps: int | None,
    keeps_calls: bool = False,
) -> tuple[Alone, list[Observed], Ranks]:
    """Run a step on many ranks. Return what runs another one, or the same, on one device."""
    ones = dict.fromkeys(mesh or (), 1) if single is None else None
    step = distributed if single is None else single

    def alone(around: Callable[[Observed], Any]) -> Observed:
        (one,), _ = watched(
            name,
            step,
            args,
            1,
            starts,
            ones,
            steps,
            is_started=single is None,
            keeps_calls=keeps_calls,
            around=around,
        )
        return one

    seen, ranks = watched(
        name, distributed, args, world, starts, mesh, steps, keeps_calls=keeps_calls
    )
    return alone, seen, ranks


def _parameters(step: Any) -> Sequence[str]:
    try:
        return [*inspect.signature(step).parameters]
    except (TypeError, ValueError):  # callables of C
        return []


def _differentiated(seen: Observed, result: Any) -> Any:
    """Differentiate the loss that a step returns, if it has not done so."""
    is_loss = isinstance(result, torch.Tensor) and result.numel() == 1 and result.requires_grad
    if is_loss and not seen.losses and not seen.steps:
        result.backward()
    return result


def watched_scripts(
    path: str,
    single: str | None,
    args: tuple[Any, ...],
    world: int,
    mesh: Mapping[str, int] | None,
    steps: int | None,
    keeps_calls: bool = False,
) -> tuple[Alone, list[Observed], Ranks]:
    """Run a script on many ranks. Return what runs it, or another one, on one. Scripts start as
    new processes do.
    """
    starts = process_state.new_generators()
    arguments = [str(x) for x in args]
    script = Script(path, arguments)
    run = functools.partial(watched, script.name, is_started=False, keeps_calls=keeps_calls)
    seen, ranks = run(script, (), world, starts, mesh, steps)

    def alone(around: Callable[[Observed], Any]) -> Observed:
        whole = Script(single or path, arguments, script.loaders.get(0, ()))
        (one,), _ = run(whole, (), 1, starts, None, steps, around=around)
        return one

    return alone, seen, ranks
