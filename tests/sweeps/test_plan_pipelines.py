"""plan with pipelines: schedules compared, each on the coordinate where it takes the most."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from stagings import counts

import shardfn as sf
from shardfn import P
from tests.support.pipelined import randn

Lib: Any = sf  # called with wrong types
N, MICROBATCHES, LAYERS, WIDTH = 4, 16, 8, 2048
ROWS = MICROBATCHES * 4096
FAST = sf.Hardware("fast", 1e15, 1e15, 1e13, 1e13, 0.0)  # computing takes most of the time


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    for w in params["layers"]:
        x = torch.relu(x @ w)
    return x.square().mean()


def step(params: Any, x: torch.Tensor, *, schedule: sf.Schedule) -> Any:
    grad = sf.pipelined_grad(loss, schedule.microbatches, schedule=schedule)
    value, grads = grad(params, x)
    return sf.tree_map(lambda p, g: p - 0.1 * g, params, grads), value


def without(params: Any, x: torch.Tensor, *, schedule: sf.Schedule) -> Any:
    return sf.accumulate(sf.value_and_grad(loss), schedule.microbatches)(params, x)


def of_another(params: Any, x: torch.Tensor, *, schedule: sf.Schedule) -> Any:
    return sf.pipelined_grad(loss, schedule.microbatches, schedule="gpipe")(params, x)


def shapes(layers: int = LAYERS, width: int = WIDTH, rows: int = ROWS) -> tuple[Any, Any]:
    return {"layers": [sf.ShapeDtype((width, width))] * layers}, sf.ShapeDtype((rows, width))


SMALL = shapes(4, 8, 16)


def places(params: Any) -> Callable[[Any, sf.Schedule], Any]:
    """The placements of the step, for the stages of a schedule."""

    def of(mesh: Any, schedule: sf.Schedule) -> Any:
        chunks = schedule.stages // schedule.coordinates
        plan = sf.strategy("pipeline", params, mesh, chunks=chunks, order=schedule.order)
        return plan.params, P("dp") if "dp" in mesh.mesh_dim_names else P()

    return of


def found_for(pipelines: Any, args: Any = SMALL, fn: Any = step, **options: Any) -> sf.Sweep:
    given = {"meshes": [(pipelines[0].coordinates,)], "in_placements": places(args[0])}
    return sf.plan(fn, *args, pipelines=pipelines, **{**given, **options})


GPIPE = sf.schedules.gpipe(N, MICROBATCHES)
ONE = sf.schedules.one_f_one_b(N, MICROBATCHES)
TWO = sf.schedules.interleaved(N, MICROBATCHES, chunks=2)


@pytest.fixture(scope="module")
def compared() -> Any:
    """Three schedules in a memory that GPipe does not have."""
    return found_for([GPIPE, ONE, TWO], shapes(), hardware=FAST, memory="2GiB")


def test_memory_forbids_gpipe_and_time_prefers_interleaved(compared: Any) -> None:
    assert [plan.schedule for plan in compared.rows] == [TWO, ONE]
    assert compared.best.schedule is TWO
    assert compared.best.time.total < compared.rows[1].time.total
    assert all(plan.memory.peak <= 2 * 2**30 for plan in compared.rows)
    (refused,) = compared.refused
    assert refused.axes.sizes == (N,)
    assert refused.options["schedule"] is GPIPE
    assert refused.why.startswith("2.2 GiB on pp=1, ")
    assert f"  (pp=4), gpipe, 16 microbatches: {refused.why}" in str(compared).splitlines()


def by_hand(schedule: sf.Schedule, args: Any) -> Iterator[Any]:
    """The step lowered on each rank of a pipeline."""
    for rank in range(schedule.coordinates):
        with sf.fake_world(schedule.coordinates, rank=rank, numerics=False):
            mesh = sf.make_mesh((schedule.coordinates,), ("pp",))
            run = functools.partial(step, schedule=schedule)
            yield sf.shard(run, mesh, places(args[0])(mesh, schedule)).lower(*args)


@pytest.mark.parametrize("which", [0, 1])
def test_figures_are_those_of_the_step_lowered_by_hand(compared: Any, which: int) -> None:
    plan = compared.rows[which]
    times, peaks = [], []
    for lowered in by_hand(plan.schedule, shapes()):
        times.append(lowered.time(FAST))
        peaks.append(lowered.memory.peak)
    assert plan.memory.peak == max(peaks)
    assert plan.time.total == max(time.total for time in times)
    idle = sum(time.bubble for time in times) / sum(time.total for time in times)
    assert plan.idle == idle
    used = sum(time.mfu * time.total for time in times) / len(times)
    assert 0 < plan.mfu == pytest.approx(used / plan.time.total)


def test_the_table_says_schedule_stages_microbatches_and_idle_share(compared: Any) -> None:
    lines = str(compared).splitlines()
    assert lines[1].split()[:5] == ["mesh", "schedule", "stages", "microbatches", "idle"]
    best = compared.best
    wanted = ["*", "(pp=4)", "interleaved", "8", "16", f"{best.idle:.1%}"]
    assert lines[2].split()[:6] == wanted
    assert f"  placements = {best.placements.text()}" in lines


def test_the_best_plan_runs_as_it_stands() -> None:
    pipelines = [sf.schedules.gpipe(2, 4), sf.schedules.zero_bubble(2, 4)]
    best = found_for(pipelines).best
    assert best.schedule is not None
    params, x = {"layers": [randn(8, 8) for _ in range(4)]}, randn(16, 8)
    run = functools.partial(step, schedule=best.schedule)
    with sf.fake_world(2):
        mesh = sf.make_mesh(best.axes.sizes, best.axes.names)
        sharded = sf.shard(run, mesh, best.placements.in_placements, backend="aten")
        found = sf.full(sharded(params, x))
    torch.testing.assert_close(found, run(params, x), rtol=0, atol=1e-10)


def test_meshes_and_schedules_are_paired_by_coordinates_from_one_capture_a_schedule() -> None:
    on_one, on_two, zbv = sf.schedules.gpipe(1, 4), sf.schedules.gpipe(2, 4), sf.schedules.zbv(2, 4)
    before = counts["captures"]
    found = found_for([on_one, on_two, zbv], meshes=[(1, 4), (2, 2), (2, 1)])
    assert counts["captures"] == before + 3
    pairs = {(plan.axes.sizes, getattr(plan.schedule, "name", None)) for plan in found.rows}
    wanted = {((1, 4), "gpipe")}
    wanted |= {(sizes, name) for sizes in [(2, 2), (2, 1)] for name in ("gpipe", "zbv")}
    assert pairs == wanted
    assert all(plan.axes.names == ("pp", "dp") for plan in found.rows)


def test_placements_may_be_one_tree_for_all_schedules() -> None:
    stages = {"layers": [P(pp=0), P(pp=0), P(pp=1), P(pp=1)]}, P()
    pipelines = [sf.schedules.gpipe(2, 4), sf.schedules.one_f_one_b(2, 8)]
    found = found_for(pipelines, in_placements=stages)
    assert {getattr(plan.schedule, "microbatches", None) for plan in found.rows} == {4, 8}
    assert len({plan.placements.text() for plan in found.rows}) == 1


def test_a_message_counts_with_all_its_bytes() -> None:
    plan = found_for([sf.schedules.gpipe(2, 4)]).best
    activation = 16 // 4 * 8 * 4
    rest = [c for c in plan.collectives if c.kind != "send"]
    assert plan.sent == 4 * activation + sum(2 * c.nbytes / 2 for c in rest)


def test_the_axis_of_the_stages_has_any_name() -> None:
    def along(params: Any, x: Any, *, schedule: sf.Schedule) -> Any:
        grad = sf.pipelined_grad(loss, schedule.microbatches, schedule=schedule, axis="stage")
        return grad(params, x)

    def stages(mesh: Any, schedule: sf.Schedule) -> Any:
        plan = sf.strategy("pipeline", SMALL[0], mesh, axis="stage")
        return plan.params, P("dp") if "dp" in mesh.mesh_dim_names else P()

    meshes = [(2,), {"dp": 2, "stage": 4}]
    pipelines = [sf.schedules.gpipe(2, 4), sf.schedules.one_f_one_b(4, 4)]
    found = sf.plan(
        along, *SMALL, meshes=meshes, pipelines=pipelines, in_placements=stages, axis="stage"
    )
    rows = {(str(row.axes), row.schedule.name) for row in found.rows if row.schedule}
    assert rows == {("(stage=2)", "gpipe"), ("(dp=2, stage=4)", "one_f_one_b")}


OF_TWO = [sf.schedules.gpipe(2, 4)]
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "no schedules": (
        lambda: sf.plan(step, *SMALL, meshes=[(2,)], pipelines=[]),
        "plan(step), pipelines: it is [], a list\n  needed: a list of sf.Schedules",
    ),
    "names": (
        lambda: Lib.plan(step, *SMALL, meshes=[(2,)], pipelines=["1f1b"]),
        "plan(step), pipelines: it is ['1f1b'], a list\n  needed: a list of sf.Schedules",
    ),
    "no parameter": (
        lambda: found_for(OF_TWO, fn=loss),
        "plan(loss), fn: the function takes no argument schedule\n  needed: a function that \
also takes schedule= "
        "and passes it to pipelined_grad",
    ),
    "no placements": (
        lambda: found_for(OF_TWO, in_placements=sf.auto),
        "plan(step), in_placements: sf.auto does not choose stages",
    ),
    "a part of the placements": (
        lambda: found_for(OF_TWO, in_placements=lambda mesh, schedule: (sf.auto, P())),
        "plan(step), in_placements: sf.auto does not choose stages",
    ),
    "no axis": (
        lambda: found_for(OF_TWO, axis_names=("stage",)),
        "plan(step), pipelines: (stage=2) has no axis 'pp'\n  gpipe is for 2 pipeline ranks, "
        "but no mesh has pp=2",
    ),
    "coordinates": (
        lambda: found_for(OF_TWO, meshes=[(2,), (3,)]),
        "plan(step), pipelines: (pp=3): no schedule is for 3 pipeline ranks\n  needed: for "
        "each schedule, a mesh whose axis 'pp' has as many ranks as the schedule",
    ),
    "no stages": (
        lambda: found_for(OF_TWO, in_placements=P()),
        "plan(step), pipelines: gpipe is not used: no parameter is on a pipeline stage, or fn "
        "does not call pipelined_grad",
    ),
    "no pipeline": (
        lambda: found_for(OF_TWO, fn=without),
        "plan(without), pipelines: gpipe is not used",
    ),
    "another schedule": (
        lambda: found_for([sf.schedules.one_f_one_b(2, 4)], fn=of_another),
        "plan(of_another), fn: the function was called with one_f_one_b, but its "
        "pipelined_grad uses another schedule",
    ),
    "nothing fits": (
        lambda: found_for([*OF_TWO, sf.schedules.one_f_one_b(2, 4)], memory=1000),
        "plan(step), memory: (pp=2), gpipe, 4 microbatches: ",
    ),
    "the only one does not fit": (
        lambda: found_for(OF_TWO, memory=1000),
        "plan(step), memory: gpipe, 4 microbatches, do not fit in 1000 B per rank of (pp=2)",
    ),
    "other stages": (
        lambda: found_for([sf.schedules.gpipe(2, 4)], in_placements=_on_four),
        "the schedule has 1 stages on pipeline rank 0, but a parameter is on stage 1 of this rank",
    ),
}


def _on_four(mesh: Any, schedule: sf.Schedule) -> Any:
    return sf.strategy("pipeline", SMALL[0], mesh, chunks=2).params, P()


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_refused_by_name(name: str) -> None:
    run, text = WRONG[name]
    with pytest.raises(sf.ShardError) as error:
        run()
    assert text in str(error.value)


def test_auto_beside_stages_is_refused_by_shard_too() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("pp",))
        specs = {"layers": [P(pp=0), P(pp=0), P(pp=1), P(pp=1)]}, sf.auto
        run = sf.shard(functools.partial(step, schedule=OF_TWO[0]), mesh, specs)
        with pytest.raises(sf.PlacementError) as error:
            run.lower(*SMALL)
    text = (
        "in_placements: sf.auto does not choose pipeline stages, but params['layers'][0] is on a "
        "stage"
    )
    assert text in str(error.value)
