"""Stage 4 of one rank's program: compare it among all ranks, compile it, and assign donated
memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import _compat
from ... import schedule as passes
from ..._compat.compilations.undisturbed import (
    SettingsChanged,
    process_settings,
    random_state_kept,
    undisturbed,
)
from ...compile import BACKENDS, Families
from ...compile.backends import Runner, donate
from ...compile.collective_order import refuse_other_order
from ...compile.donations import donations
from ...compile.failures import failure
from ...errors import ShardError
from ...mesh import group_names
from ...partition import Plan
from ...stage_log import stage
from ...types import LocalProgram
from .. import cache
from ..agreement import agree, agree_on_collectives, has_others
from ..arguments import Placed, donated_places
from ..recorded import Recorded, refuse_host_work
from ..warmup import Warming, switch_of
from .ranges import ranged, with_named_collectives, with_ranges
from .watched import watched

ATTEMPTS = 3  # to compile while other threads change torch's settings


def runner(
    name: str,
    placed: Placed,
    plan: Plan,
    schedule_plan: passes.SchedulePlan,
    program: LocalProgram,
    backend: str,
    families: Families | None = None,
    *,
    has_own_sizes: bool = False,
    may_have_own_sizes: bool = False,
    warmup: str | None = None,
    is_backward: bool = False,
    cuda_graphs: bool = False,
) -> Runner:
    """Compare this rank's local program among the ranks, and compile it.

    Args:
        name: of the function, for errors.
        placed: its arguments.
        plan: the plan, which must be equal on all ranks.
        schedule_plan: the schedule, which must be equal on all ranks.
        program: the program of this rank.
        backend: the backend that compiles it.
        families: the compiled programs of the function for other sizes, if it was captured for
            them too.
        has_own_sizes: whether other ranks have programs of their own.
        may_have_own_sizes: whether they may, if it turns out that arguments differ in size.
        warmup: the backend that runs the first calls, while the other compiles.
        is_backward: whether it is the backward of a call, whose inputs are residuals.
        cuda_graphs: whether its kernels are recorded, and launched together.
    """
    if has_others(placed) and has_own_sizes:
        agree_on_collectives(name, placed, program)
    elif has_others(placed):
        agree(name, plan, schedule_plan, may_have_own_sizes=may_have_own_sizes)
    compile_now = functools.partial(
        compiled_program,
        name,
        placed,
        program,
        backend,
        families,
        is_backward=is_backward,
        cuda_graphs=cuda_graphs,
    )
    is_warming = not (warmup is None or warmup == backend or has_own_sizes)
    switch = switch_of(name, placed) if is_warming else None
    if warmup is None or switch is None:
        with _compat.paused_gc():
            compiled = settled(name, compile_now)
        return watched(compiled, name, placed, program)
    plain = compiled_program(name, placed, program, warmup)
    later = functools.partial(compile_now, wanted=process_settings())
    warming = Warming(plain, later, switch)
    return watched(warming, name, placed, program)


def settled(name: str, compile_now: Callable[[], Runner]) -> Runner:
    """Compile a program, again if another thread changed a setting meanwhile.

    Raises:
        ShardError: other threads changed one each time.
    """
    for _ in range(ATTEMPTS):
        with contextlib.suppress(SettingsChanged):
            return compile_now()
    got = (
        "other threads changed torch's settings, such as the default dtype, during each compilation"
    )
    fix = "call the function once before the other threads start"
    raise ShardError.of(name, f"the program was compiled {ATTEMPTS} times, but {got}", fix=fix)


def compiled_program(
    name: str,
    placed: Placed,
    program: LocalProgram,
    backend: str,
    families: Families | None = None,
    *,
    is_backward: bool = False,
    cuda_graphs: bool = False,
    wanted: tuple[Any, ...] | None = None,
) -> Runner:
    """Compile this rank's local program without comparing ranks.

    Args:
        name: of the function, for errors.
        placed: its arguments.
        program: the program of this rank.
        backend: the backend that compiles it.
        families: the compiled programs of the function for other sizes.
        is_backward: whether it is the backward of a call, whose inputs are residuals.
        cuda_graphs: whether its kernels are recorded, and launched together.
        wanted: torch's settings at the call, if other threads may have changed them since.

    Raises:
        SettingsChanged: another thread changes torch's settings.
    """
    is_recorded = cuda_graphs and backend == "inductor" and _runs_here(placed)
    if is_recorded:
        refuse_host_work(name, placed, program)
    if placed.mesh is not None:
        _bind_groups(placed)
    with _compat.staging(), _compat.patched("graphs"):
        own = passes.copied(program.graph)
    graph = _compat.graph_module(torch.nn.Module(), own)
    donated = donated_places(placed)
    if backend == "aten":
        profiled = lambda: _op_by_op_with_ranges(program.graph, donated)
        return ranged(name, BACKENDS[backend](graph, donated), profiled)
    pairs = donations(program, donated)
    ops = sum(node.op == "call_function" for node in own.nodes)
    with (
        _compat.staging(),
        _compat.patched("graphs"),
        _compat.autocast_off(),
        undisturbed(wanted),
        random_state_kept() if wanted else contextlib.nullcontext(),
        stage("compile", name, is_awaited=wanted is None) as note,
    ):
        note(ops=ops)
        checked = donated if is_backward else _checked(placed)
        try:
            compiled = _compiled(graph, donated, pairs, backend, families, checked)
        except (ShardError, SettingsChanged):
            raise
        except Exception as error:  # Inductor may raise anything
            raise failure(name, program.graph, error) from error
    if code := _compat.generated_code(compiled):
        refuse_other_order(name, program.graph, code)
    if is_recorded:
        return Recorded(name, compiled)
    return ranged(name, compiled, lambda: with_named_collectives(compiled, program.graph))


def _op_by_op_with_ranges(graph: torch.fx.Graph, donated: Sequence[int]) -> Runner:
    """Build a runner of a graph op by op, with a range of torch.profiler for each line."""
    module = _compat.graph_module(torch.nn.Module(), with_ranges(graph))
    return BACKENDS["aten"](module, donated)


def _compiled(
    graph: torch.fx.GraphModule,
    donated: list[int],
    pairs: dict[int, int],
    backend: str,
    families: Families | None,
    checked: Sequence[int],
) -> Runner:
    """Compile a graph for its own sizes, or look up a program for many sizes."""

    def note() -> None:
        cache.counts["compilations"] += 1

    compile_graph = BACKENDS[backend]
    if families is None:
        return compile_graph(graph, donated, note, checked, pairs)
    donate(graph.graph, pairs)
    graph.recompile()
    own = lambda: compile_graph(graph, donated, note, checked)
    return families.runner(graph, donated, own, note)


def _runs_here(placed: Placed) -> bool:
    """Return whether calls run compiled code: not on a mesh of a world without real ranks."""
    return placed.mesh is None or placed.world.kind == "real"


def _bind_groups(placed: Placed) -> None:
    """Bind the axis names of a program to this rank's process groups, once."""
    for k, name in enumerate(group_names(placed.mesh)):
        _compat.register_group(name, placed.mesh.get_group(k))


def _checked(placed: Placed) -> list[int]:
    """Which placeholders have the layout of the program in each call: the coordinates, and the
    arguments, by their key and by `layouts.LocalLayouts`.
    """
    return list(range(len(placed.axes.names) + len(placed.tensors)))
