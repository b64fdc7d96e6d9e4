"""A sweep: every combination priced from one capture, each row as its call makes it."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from stagings import counts
from torch.testing import assert_close

import shardfn as sf
from shardfn import P
from shardfn.pipelines import schedules
from shardfn.sweeps.calls import schedule_text
from shardfn.sweeps.table import Row

Lib: Any = sf  # called with wrong types
OPT = sf.optim(torch.optim.AdamW, lr=1e-3)
MESHES = [{"dp": 4}, {"dp": 2, "tp": 2}]


def block(w: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(x @ w["up"]) @ w["down"]


def step(params: Any, state: Any, x: torch.Tensor, *, microbatches: int, remat: str) -> Any:
    layer = sf.checkpoint(block, policy=remat)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for w in params["layers"]:
            x = layer(w, x)
        return x.square().mean()

    value, grads = sf.accumulate(sf.bucketed_grad(loss), microbatches)(params, x)
    params, state = OPT.update(params, grads, state)
    return params, state, value


def sgd(params: Any, x: torch.Tensor) -> Any:
    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return block(params, x).square().mean()

    value, grads = sf.value_and_grad(loss)(params, x)
    return sf.tree_map(lambda p, g: p - 0.1 * g, params, grads), value


def columns(mesh: Any) -> Any:
    """Tensor parallel layers, for meshes with an axis tp."""
    base = sf.placements(
        PARAMS, {"layers.*.up": P(None, "tp"), "layers.*.down": P("tp")}, mesh=mesh
    )
    return sf.strategy("ddp", PARAMS, mesh, base=sf.strategy("tensor", PARAMS, mesh, base=base))


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


GENERATOR = torch.Generator().manual_seed(0)
LAYERS = [{"up": randn(6, 10), "down": randn(10, 6)} for _ in range(2)]
PARAMS = {"layers": LAYERS[:1]}
DEEP = {"layers": LAYERS}
X = randn(16, 6)
FULL = PARAMS, OPT.init(PARAMS), X
SMALL = PARAMS["layers"][0], X
REMAT = ["everything_saveable", "nothing_saveable"]
STRATEGIES: dict[str, Any] = {"ddp": lambda mesh: sf.strategy("ddp", PARAMS, mesh)}
STRATEGIES |= {"zero3": lambda mesh: sf.strategy("zero3", PARAMS, mesh), "columns": columns}


@pytest.fixture(scope="module")
def swept() -> sf.Sweep:
    before = counts["captures"]
    found = sf.sweep(
        *(step, *FULL),
        meshes=MESHES,
        strategies=STRATEGIES,
        microbatches=[1, 2],
        remat=REMAT,
        hardware=["H100", "A100"],
    )
    assert counts["captures"] == before + 4  # one for each way to call the step
    return found


def figures(lowered: Any, row: Row) -> tuple[Any, ...]:
    hardware = {"H100 SXM, NVLink": "H100", "A100 SXM, NVLink": "A100"}[row.hardware]
    time = lowered.time(hardware)
    return lowered.memory.peak, time.total, time.exposed, time.mfu, lowered.collectives


def of_row(row: Row) -> tuple[Any, ...]:
    return row.peak, row.time.total, row.time.exposed, row.mfu, row.collectives


def ran(row: Row, **names: Any) -> Any:
    """The function that the text of a row defines, in the world that is open."""
    scope: dict[str, Any] = {"sf": sf, **names}
    exec(row.call, scope)
    return scope["run"]


def ranks(row: Row) -> int:
    return functools.reduce(lambda a, b: a * b, row.axes.sizes)


def test_meshes_strategies_and_hardware_share_one_capture() -> None:
    before, lowered = counts["captures"], counts["partitions"]
    found = sf.sweep(
        *(lambda p, x: sgd(p, x), *SMALL),
        meshes=[*MESHES, (8,)],
        strategies=["ddp", "zero3", "zero1"],
        hardware=["H100", "A100", "H200"],
    )
    assert counts["captures"] == before + 1
    assert counts["partitions"] == lowered + 3 * 3  # hardware shares programs too
    assert len(found.rows) == 3 * 3 * 3 and not found.refused


def test_there_is_a_row_for_each_combination_that_can_be(swept: sf.Sweep) -> None:
    combinations = {(x.axes.sizes, x.strategy, *x.options.values(), x.hardware) for x in swept.rows}
    assert len(combinations) == len(swept.rows) == (2 * 2 + 1) * 2 * 2 * 2
    refused = {(x.axes.sizes, x.strategy, *x.options.values()) for x in swept.refused}
    assert refused == {((4,), "columns", m, policy) for m in (1, 2) for policy in REMAT}
    assert all("'tp'" in x.why for x in swept.refused)


def test_the_call_of_each_row_makes_its_figures(swept: sf.Sweep) -> None:
    by_call: dict[str, Any] = {}  # hardware changes no call
    for row in swept.rows:
        if row.call not in by_call:
            with sf.fake_world(ranks(row), numerics=False):
                by_call[row.call] = ran(row, step=step).lower(*FULL)
        assert figures(by_call[row.call], row) == of_row(row), row.call
    assert len(by_call) == len(swept.rows) / 2


def test_a_row_is_lowered_again_from_its_capture(swept: sf.Sweep) -> None:
    before = counts["captures"]
    for row in swept.rows[::3]:
        assert figures(row.lowered(), row) == of_row(row)
    assert counts["captures"] == before


@pytest.mark.parametrize("seed", range(3))
def test_the_step_of_a_row_has_the_values_of_the_plain_function(swept: sf.Sweep, seed: int) -> None:
    row = random.Random(seed).choice(swept.rows)
    with sf.fake_world(ranks(row)):
        found = sf.full(ran(row, step=step)(*FULL))
    assert_close(found, step(*FULL, **row.options), rtol=0, atol=1e-12)


def test_rows_of_the_front_are_those_that_no_row_beats(swept: sf.Sweep) -> None:
    for row in swept.rows:
        others = [x for x in swept.rows if x.hardware == row.hardware and x is not row]
        worse = [
            x.time.total <= row.time.total
            and x.peak <= row.peak
            and (x.time.total < row.time.total or x.peak < row.peak)
            for x in others
        ]
        assert row.is_front is not any(worse)
    assert swept.front == tuple(x for x in swept.rows if x.is_front)
    assert {x.hardware for x in swept.front} == {x.hardware for x in swept.rows}


def test_rows_stand_the_fastest_first_and_those_that_do_not_fit_last() -> None:
    options: dict[str, Any] = {"meshes": MESHES, "strategies": ["ddp", "zero3"]}
    free = sf.sweep(sgd, *SMALL, **options)
    assert not any(x.excess for x in free.rows)
    peaks = sorted(x.peak for x in free.rows)
    found = sf.sweep(sgd, *SMALL, **options, memory=peaks[1])
    over = [x.excess > 0 for x in found.rows]
    assert over == sorted(over) and 0 < sum(over) < len(over)
    for part in (False, True):
        times = [x.time.total for x in found.rows if (x.excess > 0) is part]
        assert times == sorted(times)
    assert not any(x.is_front for x in found.rows if x.excess)
    lines = str(found).splitlines()
    marks = [line.split()[0] for line in lines[2 : 2 + len(found.rows)]]
    assert [mark == "!" for mark in marks] == over
    assert "  ! needs more memory than a rank has" in lines


def test_the_capacity_of_the_hardware_is_the_limit_by_default() -> None:
    small = sf.Hardware("small", 1e15, 1e15, 1e13, 1e11, 0.0, capacity=1000.0)
    found = sf.sweep(sgd, *SMALL, meshes=[(4,)], strategies=["ddp"], hardware=[small])
    assert found.best.excess == found.best.peak - 1000 > 0
    assert "the fastest, best.call:" in str(found)


def test_what_is_sent_over_each_axis_is_what_the_collectives_of_the_axis_send(
    swept: sf.Sweep,
) -> None:
    row = next(x for x in swept.rows if x.strategy == "columns")
    assert set(row.sent_by_axis) == {"dp", "tp"}
    assert sum(row.sent_by_axis.values()) == pytest.approx(row.sent)
    by_hand = sum(2 * c.nbytes / 2 for c in row.lowered().collectives if c.axis == "tp")
    assert {c.kind for c in row.collectives if c.axis == "tp"} == {"all_reduce"}
    assert row.sent_by_axis["tp"] == by_hand > 0


def test_the_state_of_an_optimizer_is_placed_by_the_strategy() -> None:
    found = sf.sweep(
        functools.partial(step, microbatches=1, remat=REMAT[0]),
        *FULL,
        meshes=[{"dp": 2}],
        strategies=["zero1", "zero3"],
    )
    for row in found.rows:
        params, state, x = row.placements.in_placements
        with sf.fake_world(2, numerics=False):
            plan = sf.strategy(row.strategy, PARAMS, sf.make_mesh((2,), ("dp",)))
            wanted = OPT.state_placements(plan.state, PARAMS)
        assert (params, state, x) == (dict(plan.params), wanted, P("dp"))


def test_trees_like_the_parameters_are_a_state_and_numbers_have_no_placement() -> None:
    def momentum(p: Any, m: Any, rate: float, x: torch.Tensor, scale: torch.Tensor) -> Any:
        _, g = sf.value_and_grad(lambda p, x: block(p, x).square().mean())(p, x)
        m = sf.tree_map(lambda a, b: 0.9 * a + b * scale, m, g)
        return sf.tree_map(lambda a, b: a - rate * b, p, m), m

    params, x = SMALL
    args = params, params, 0.1, x, torch.ones((), dtype=torch.float64)
    found = sf.sweep(momentum, *args, meshes=[{"dp": 2}], strategies=["zero1"])
    places = found.best.placements.in_placements
    assert places[0] == {"up": P(), "down": P()}
    assert places[1] == {"up": P(None, "dp"), "down": P("dp")}
    assert places[2:] == (None, P("dp"), P())


def test_two_sweeps_say_the_same() -> None:
    options: dict[str, Any] = {"meshes": MESHES, "strategies": ["ddp", "zero3", "auto"]}
    first = str(sf.sweep(sgd, *SMALL, **options))
    sf.clear_cache()
    assert str(sf.sweep(sgd, *SMALL, **options)) == first


def test_columns_that_are_equal_in_all_rows_stand_in_the_title() -> None:
    one = str(sf.sweep(sgd, *SMALL, meshes=MESHES, strategies=["ddp"]))
    assert one.splitlines()[0] == "sgd on H100 SXM, NVLink, ddp"
    assert "strategy" not in one.splitlines()[1] and "hardware" not in one.splitlines()[1]
    two = str(sf.sweep(sgd, *SMALL, meshes=MESHES, strategies=["ddp", "zero3"]))
    assert two.splitlines()[0] == "sgd on H100 SXM, NVLink" and " strategy " in two


def test_options_with_one_reason_are_refused_in_one_line(swept: sf.Sweep) -> None:
    lines = [line for line in str(swept).splitlines() if "'tp'" in line and "(dp=4)" in line]
    (line,) = lines
    assert line.startswith("  (dp=4), columns: ")


def test_what_is_expensive_is_noted_in_the_row_and_not_printed(
    recwarn: pytest.WarningsRecorder,
) -> None:
    wide = {"up": sf.ShapeDtype((1024, 4096)), "down": sf.ShapeDtype((4096, 1024))}
    found = sf.sweep(
        *(sgd, wide, sf.ShapeDtype((8192, 1024))), meshes=[{"dp": 2, "tp": 2}], strategies=["ddp"]
    )
    (text,) = found.best.warnings
    assert "computed replicated by all 2 ranks of tp" in text
    assert not [x for x in recwarn if "replicated" in str(x.message)]


def by_schedule(params: Any, x: torch.Tensor, *, schedule: sf.Schedule, remat: str) -> Any:
    layer = sf.checkpoint(block, policy=remat)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for w in params["layers"]:
            x = layer(w, x)
        return x.square().mean()

    grad = sf.pipelined_grad(loss, schedule.microbatches, schedule=schedule)
    return grad(params, x)


def test_schedules_and_strategies_are_combined() -> None:
    pipelines = [sf.schedules.gpipe(2, 4), sf.schedules.one_f_one_b(2, 4)]
    found = sf.sweep(
        *(by_schedule, DEEP, X),
        meshes=[(2, 2)],
        strategies=["pipeline", "ddp+pipeline"],
        pipelines=pipelines,
        remat=REMAT,
    )
    assert len(found.rows) == 8
    assert "schedule" in str(found).splitlines()[1] and "idle" in str(found).splitlines()[1]
    for row in found.rows[::3]:
        with sf.fake_world(4):
            values = sf.full(ran(row, by_schedule=by_schedule)(DEEP, X))
        plain = by_schedule(DEEP, X, **row.options)
        assert_close(values, plain, rtol=0, atol=1e-12)
        lowered = row.lowered()
        assert lowered.collectives and lowered.partition.stage_axis == 0
    batch = {row.strategy: row.placements.in_placements[1] for row in found.rows}
    assert batch == {"pipeline": P(), "ddp+pipeline": P("dp")}


def test_the_axis_of_the_stages_has_any_name() -> None:
    def along(params: Any, x: Any, *, schedule: sf.Schedule) -> Any:
        loss = lambda params, x: sum(((x @ w["up"]) @ w["down"]).mean() for w in params["layers"])
        return sf.pipelined_grad(loss, 4, schedule=schedule, axis="stage")(params, x)

    options: Any = {"pipelines": [sf.schedules.gpipe(2, 4)], "strategies": ["ddp+pipeline"]}
    found = sf.sweep(along, DEEP, X, meshes=[(2, 2)], axis="stage", **options)
    assert [str(row.axes) for row in found.rows] == ["(stage=2, dp=2)"]
    assert found.best.lowered().partition.stage_axis == 0


@pytest.mark.parametrize(
    "schedule",
    [
        schedules.gpipe(2, 3),
        schedules.one_f_one_b(3, 5),
        schedules.zero_bubble(2, 4),
        schedules.interleaved(2, 4, chunks=3),
        schedules.zbv(2, 4),
        schedules.dualpipev(2, 4),
        sf.Schedule("mine", [[("F", 0, 0), ("BW", 0, 0)]]),
        attrs.evolve(schedules.gpipe(2, 3), name="zbv"),
    ],
    ids=lambda x: x.name,
)
def test_the_text_of_a_schedule_makes_it(schedule: sf.Schedule) -> None:
    assert eval(schedule_text(schedule), {"sf": sf}) == schedule


def test_attention_of_a_strategy_reaches_shard() -> None:
    def attend(p: Any, x: torch.Tensor) -> torch.Tensor:
        q = (x @ p["w"]).unsqueeze(1)
        return torch.nn.functional.scaled_dot_product_attention(q, q, q).square().mean()

    args = {"w": sf.ShapeDtype((8, 8))}, sf.ShapeDtype((2, 64, 8))
    ring = lambda mesh: sf.strategy("context", args[0], mesh, attention={"cp": "ring"})
    found = sf.sweep(attend, *args, meshes=[{"cp": 4}], strategies={"ring": ring})
    assert "attention={'cp': 'ring'}" in found.best.call
    assert {c.kind for c in found.best.collectives} >= {"ppermute"}


def test_the_planner_reaches_shard() -> None:
    found = sf.sweep(sgd, *SMALL, meshes=[{"dp": 2}], strategies=["zero3"], planner="greedy")
    assert ", planner='greedy')" in found.best.call
    assert found.best.lowered().traced.request.planner == "greedy"


ONE = [{"dp": 2}]
OF_TWO = [sf.schedules.gpipe(2, 4)]
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "no meshes": (
        lambda: sf.sweep(sgd, *SMALL, meshes=[]),
        "sweep, meshes: meshes is [], a list, and must be a list of meshes",
    ),
    "axes": (
        lambda: sf.sweep(sgd, *SMALL, meshes=[{"dp": 0}]),
        "sweep, meshes: meshes is [{'dp': 0}], a list, and must be a list of meshes",
    ),
    "names": (
        lambda: sf.sweep(sgd, *SMALL, meshes=[(2, 2, 2, 2)]),
        "sweep(sgd), axis_names: axis_names has 0 names, but the mesh has shape (2, 2, 2, 2)",
    ),
    "no strategies": (
        lambda: sf.sweep(sgd, *SMALL, meshes=ONE, strategies=[]),
        "sweep(sgd), strategies: it is [], a list\n  needed: a list of names of strategies, "
        "or a dict from names to placements",
    ),
    "a name alone": (
        lambda: sf.sweep(sgd, *SMALL, meshes=ONE, strategies="ddp"),
        "sweep(sgd), strategies: it is 'ddp', a str",
    ),
    "an unknown strategy": (
        lambda: sf.sweep(sgd, *SMALL, meshes=ONE, strategies=["ddp", "zero4", "ddp+fsdp"]),
        "sweep(sgd), strategies: there is no strategy 'zero4'\n  there is no strategy 'fsdp'",
    ),
    "no hardware": (
        lambda: sf.sweep(sgd, *SMALL, meshes=ONE, hardware=[]),
        "sweep(sgd), hardware: it is [], a list\n  needed: a list of sf.Hardware or of names "
        "of devices",
    ),
    "a name of hardware alone": (
        lambda: sf.sweep(sgd, *SMALL, meshes=ONE, hardware="H100"),
        "sweep(sgd), hardware: it is 'H100', a str",
    ),
    "unknown hardware": (
        lambda: sf.sweep(sgd, *SMALL, meshes=ONE, hardware=["H100", "H1000"]),
        "sweep(sgd), hardware: hardware is 'H1000'\n  needed: the name of a known device (A100",
    ),
    "microbatches": (
        lambda: sf.sweep(step, *FULL, meshes=ONE, microbatches=[1, 0]),
        "sweep(step), microbatches: it is [1, 0], a list\n  needed: a list of positive ints",
    ),
    "no microbatches": (
        lambda: sf.sweep(step, *FULL, meshes=ONE, microbatches=[]),
        "sweep(step), microbatches: it is [], a list",
    ),
    "remat": (
        lambda: Lib.sweep(step, *FULL, meshes=ONE, remat=[None]),
        "sweep(step), remat: it is [None], a list\n  needed: a list of checkpoint_policies",
    ),
    "a policy": (
        lambda: sf.sweep(step, *FULL, meshes=ONE, remat=["dots"]),
        "sweep(step), remat: the policy is dots\n  at: ",
    ),
    "a step without the keyword": (
        lambda: sf.sweep(sgd, *SMALL, meshes=ONE, microbatches=[1]),
        "sweep(sgd), fn: the function takes no argument microbatches\n  needed: a function that \
also takes "
        "microbatches= and passes it to sf.accumulate",
    ),
    "a step without remat": (
        lambda: sf.sweep(sgd, *SMALL, meshes=ONE, remat=REMAT),
        "sweep(sgd), fn: the function takes no argument remat\n  needed: a function that also \
takes remat= and "
        "passes it to sf.checkpoint as policy=",
    ),
    "schedules": (
        lambda: Lib.sweep(by_schedule, PARAMS, X, meshes=ONE, pipelines=["1f1b"]),
        "sweep(by_schedule), pipelines: it is ['1f1b'], a list",
    ),
    "a schedule and microbatches": (
        lambda: sf.sweep(step, *FULL, meshes=ONE, pipelines=OF_TWO, microbatches=[1]),
        "sweep(step), microbatches: microbatches= and pipelines= are both given",
    ),
    "no axis for the schedule": (
        lambda: sf.sweep(by_schedule, PARAMS, X, meshes=ONE, pipelines=OF_TWO, remat=REMAT),
        "sweep(by_schedule), pipelines: (dp=2) has no axis 'pp'",
    ),
    "memory": (
        lambda: sf.sweep(sgd, *SMALL, meshes=ONE, memory="much"),
        "sweep(sgd), memory: 'much' is not a number of bytes",
    ),
    "parameters that are not a dict": (
        lambda: sf.sweep(torch.sin, X, meshes=ONE, strategies=["ddp", "zero3"]),
        "sweep(sin): (dp=2), ddp: strategy('ddp'), params: a Tensor\n  (dp=2), zero3: strategy(",
    ),
    "planner": (
        lambda: sf.sweep(sgd, *SMALL, meshes=ONE, strategies=["ddp", "zero3"], planner="best"),
        "planner",
    ),
    "every combination refused": (
        lambda: sf.sweep(sgd, *SMALL, meshes=ONE, strategies=["hsdp", "context"]),
        "sweep(sgd): (dp=2), hsdp: strategy('hsdp'), axis: axis names 'replica', but the mesh "
        "has (dp=2)\n  (dp=2), context: strategy('context'), axis: axis names 'cp'",
    ),
    "a batch that is no multiple": (
        lambda: sf.sweep(step, *FULL, meshes=ONE, microbatches=[3], remat=REMAT[:1]),
        "the batch cannot be split into 3 equal microbatches",
    ),
    "a step that cannot be captured": (
        lambda: sf.sweep(lambda p, x: float(x.sum()), *SMALL, meshes=ONE, strategies=["ddp"]),
        ".item() reads a tensor's value while the function is traced",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_refused_by_name(name: str) -> None:
    run, text = WRONG[name]
    with pytest.raises(sf.ShardError) as error:
        run()
    assert text in str(error.value)


def test_inside_of_a_world_it_says_what_it_says_outside_and_the_world_goes_on() -> None:
    options: dict[str, Any] = {"meshes": MESHES, "strategies": ["ddp", "zero3"]}
    wanted = sf.sweep(sgd, *SMALL, **options)
    with sf.fake_world(6):
        mesh = sf.make_mesh((6,), ("a",))
        found = sf.sweep(sgd, *SMALL, **options)
        assert str(found) == str(wanted)
        assert found.best.lowered().memory.peak == found.best.peak
        double = sf.shard(lambda x: x * 2, mesh, P("a"), backend="aten")
        assert_close(sf.full(double(X)), 2 * X)
