"""inspect_ranks and first_nan: the local tensors of all ranks at each op of a simulated run."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from compared_steps import BATCH, COLUMNS, EQUAL, ROWS
from torch import Tensor

import shardfn as sf
from shardfn import P

X = torch.arange(12.0, dtype=torch.float64).reshape(6, 2)


def line(fn: Any, mark: str) -> str:
    lines, start = inspect.getsourcelines(fn)
    (number,) = (i for i, text in enumerate(lines) if text.rstrip().endswith(f"# {mark}"))
    return f"test_inspect_ranks.py:{start + number}"


def summed(x: Tensor) -> Tensor:
    y = x * 2  # doubled
    return y.sum(0)  # summed


def run_of(n: int = 3, **options: Any) -> Any:
    with sf.fake_world(n):
        mesh = sf.make_mesh((n,), ("dp",))
        return sf.inspect_ranks(sf.shard(summed, mesh, BATCH, P()), X, **options)


def test_the_local_tensors_of_all_ranks_are_at_each_op() -> None:
    run = run_of()
    assert [op.op for op in run] == ["argument", "mul", "sum", "all_reduce", "wait_tensor"]
    (double,) = run.find(line(summed, "doubled"))
    assert (double.name, double.type, double.phase) == ("mul", "f64[6@dp, 2]", "forward")
    for rank, x in enumerate(double.values):
        assert torch.equal(x, 2 * X[2 * rank : 2 * rank + 2])
        assert torch.equal(double.inputs["x"][rank], X[2 * rank : 2 * rank + 2])
    (terms,) = run.find("sum")
    assert terms.type == "f64[2; sum@dp]"
    assert torch.equal(sum(terms.values), (2 * X).sum(0))
    assert all(torch.equal(x, (2 * X).sum(0)) for x in run[-1].values)


def test_the_cursor_goes_forwards_and_backwards_and_stays_inside() -> None:
    run = run_of()
    assert run.here.number == 0 and len(run) == 5
    assert run.next().op == "mul" and run.next(2).op == "all_reduce"
    assert run.back().op == "sum" and run.back(9).op == "argument"
    assert run.next(99).op == "wait_tensor" and run.next().op == "wait_tensor"
    assert run.goto(1) is run.here is run[1]
    assert run.goto(-1).number == 4
    assert run.goto("mul").number == run.goto(line(summed, "doubled")).number == 1
    assert run.goto(str(run.here.line)) is run.here


def test_goto_takes_the_next_op_of_a_name_and_then_the_first_again() -> None:
    def twice(x: Tensor) -> Tensor:
        return (x * 2 + 1) * 3

    run = sf.inspect_ranks(twice, X)
    first, second = run.find("mul")[0], run.goto("mul_1")
    assert run.goto(0) and run.goto("mul") is first and run.goto("mul") is second
    assert run.goto("mul") is first
    assert len(run.here.values) == 1  # one device


def test_a_collective_is_on_the_way_until_it_is_waited_for() -> None:
    run = run_of()
    assert run[2].on_the_way == () == run[4].on_the_way
    assert run[3].on_the_way == ("all_reduce over dp, 16 B",)


def test_a_watch_stops_at_the_first_op_and_rank_where_it_holds() -> None:
    seen = []

    def watch(rank: int, x: Tensor) -> Any:
        seen.append(rank)
        return rank == 2 and x.max() > 15

    run = run_of(watch=watch)
    assert {*seen} == {0, 1, 2}
    assert (run.here.op, run.here.holds) == ("mul", (2,))
    assert [op.op for op in run.stops] == ["mul", "sum", "all_reduce", "wait_tensor"]
    following = run.next_stop()
    assert following is not None and following.op == "sum"
    run.goto(-1)
    assert run.next_stop() is None and run.here.op == "wait_tensor"
    never = run_of(watch=lambda rank, x: False)
    assert never.stops == () and never.here.number == 0


def test_it_prints_ranks_with_equal_tensors_together() -> None:
    run = run_of()
    assert repr(run) == (
        "shard(summed) on 3 ranks: 5 ops\n"
        "[0/5] x = argument: f64[6@dp, 2]\n"
        "  rank 0: f64[2, 2] 0 to 3, 1 zero\n"
        "  rank 1: f64[2, 2] 4 to 7\n"
        "  rank 2: f64[2, 2] 8 to 11"
    )
    assert repr(run.goto("wait_tensor")).split("\n")[1:] == ["  ranks 0, 1, 2: f64[2] 60 to 72"]
    assert repr(run.goto("mul")).split("\n")[0] == (
        f"[1/5] mul = mul(x): f64[6@dp, 2]  # {line(summed, 'doubled')}"
    )
    text = run_of(watch=lambda rank, x: rank == 1)._repr_html_()
    assert "<table>" in text and "the watch holds on rank 1" in text and "f64[6@dp, 2]" in text


def test_a_tensor_is_described_in_numbers() -> None:
    state = lambda *x: str(sf.inspect_ranks(lambda x: x, torch.tensor(x)).here.state(0))
    assert state(1.0, -2.0, 0.0) == "f32[3] -2 to 1, 1 zero"
    assert state(float("nan"), float("inf"), 3.0) == "f32[3] all 3, 1 nan, 1 inf"
    assert state(float("nan")) == "f32[1] no finite element, 1 nan"
    assert state(3, 3) == "i64[2] all 3"
    assert state(True, False) == "bool[2] 0 to 1, 1 zero"
    assert str(sf.inspect_ranks(lambda x: x, torch.ones(0)).here.state(0)) == "f32[0] no element"


@pytest.mark.parametrize("size", [7, 5, 2])
def test_ranks_with_other_sizes_stand_side_by_side(size: int) -> None:
    x = torch.arange(float(size))
    with sf.fake_world(4):
        mesh = sf.make_mesh((4,), ("dp",))
        run = sf.inspect_ranks(sf.shard(lambda x: (x * 2).cumsum(0), mesh, BATCH), x)
    (double,) = run.find("mul")
    parts = [v for v in double.values if v is not None]
    assert torch.equal(torch.cat(parts), 2 * x)
    steps = [op.number for op in run]
    assert steps == sorted(steps)


@pytest.mark.parametrize("name", ["buckets", "scan", "experts", "ring", "random", "branch"])
def test_the_last_values_are_the_results_of_the_step(name: str) -> None:
    case = EQUAL[name]
    args = case.arguments(torch.float64)
    sizes = case.layout["mesh"]
    options = {k: x for k, x in case.layout.items() if k != "mesh"}
    world = 1
    for n in sizes.values():
        world *= n
    with sf.fake_world(world):
        mesh = sf.make_mesh(tuple(sizes.values()), tuple(sizes))
        step = sf.shard(case.step, mesh, **options)
        before = sf.random.state.get()
        run = sf.inspect_ranks(step, *args)
        assert all(
            torch.equal(x, y)
            for x, y in zip(before.values(), sf.random.state.get().values(), strict=True)
        )
        results = [x.to_local(rank=1) for x in _tensors(step(*args))]
    values = [op.values[1] for op in run if isinstance(op.values[1], Tensor)]
    for x in results:
        assert any(x.shape == y.shape and torch.equal(x, y) for y in values)


def _tensors(tree: Any) -> list[Any]:
    found: list[Any] = []
    sf.tree_map(found.append, tree)
    return found


def test_ops_of_a_loop_are_there_for_each_step() -> None:
    def body(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(carry + row), carry

    run = sf.inspect_ranks(lambda x: sf.scan(body, x[0], x), X)
    steps = run.find("tanh")
    assert len(steps) == 6
    for op, row in zip(steps, X, strict=True):
        (read,) = op.inputs.values()
        assert torch.equal(op.values[0], torch.tanh(read[0]))
        assert read[0].shape == row.shape


def rooted(w: Tensor, x: Tensor) -> Tensor:
    h = x @ w
    h = (h - 1).sqrt()  # root
    return h.sum()


def test_the_first_nan_is_found_with_its_line_its_ranks_and_its_inputs() -> None:
    w = torch.eye(4)  # so that x @ w is x
    x = torch.full((6, 4), 2.0)
    x[4, 3] = 0.5
    with sf.fake_world(6):
        mesh = sf.make_mesh((3, 2), ("dp", "tp"))
        step = sf.shard(sf.value_and_grad(rooted), mesh, (COLUMNS, BATCH))
        found = sf.first_nan(step, w, x)
        assert sf.first_nan(step, w, x.clamp(min=2.0)) is None
    assert found is not None
    assert found.op == "sqrt" and str(found.line).endswith(line(rooted, "root"))
    assert found.ranks == (5,) and found.phase == "forward"  # dp 2, tp 1
    assert found.type == "f32[6@dp, 4@tp]"
    (state,) = found.inputs.values()
    assert (state.least, state.most, state.nans) == (-0.5, 1.0, 0)
    assert (found.result.nans, found.result.most) == (1, 1.0)
    assert repr(found).split("\n") == [
        f"first nan: sqrt = sqrt at {found.line}, forward, on rank 5",
        "  f32[6@dp, 4@tp]; on rank 5: f32[2, 2] all 1, 1 nan",
        "  reads sub: f32[2, 2] -0.5 to 1",
    ]


def test_a_nan_of_the_backward_and_one_of_an_argument() -> None:
    x = torch.tensor([0.0, 1.0, 4.0])
    found = sf.first_nan(sf.value_and_grad(lambda x: (x.sqrt() * 0 * x.sqrt()).sum()), x)
    assert found is not None and found.phase == "backward"
    x[1] = float("nan")
    found = sf.first_nan(summed, x)
    assert found is not None
    assert (found.op, found.name, found.line, dict(found.inputs)) == ("argument", "x", None, {})


def test_a_nan_inside_of_a_loop_is_that_of_its_op() -> None:
    def body(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        carry = carry - row
        carry = carry.log()  # log
        return carry, carry

    x = torch.tensor([[9.0], [1.0], [8.0]])
    found = sf.first_nan(lambda x: sf.scan(body, x[0] * 3, x), x)
    assert found is not None
    assert found.op == "log" and str(found.line).endswith(line(body, "log"))


def test_each_bad_input_is_named() -> None:
    bad: list[tuple[Any, str]] = [
        (lambda: sf.inspect_ranks(3), "step is 3, a int"),  # pyright: ignore
        (lambda: sf.first_nan(3), "step is 3, a int"),  # pyright: ignore
        (lambda: sf.inspect_ranks(summed, X, watch=3), "watch is 3, a int"),  # pyright: ignore
        (lambda: run_of().goto(7), "the run has no op 7"),
        (lambda: run_of().goto("conv"), "no op is 'conv'"),
        (lambda: run_of().find(3), "where is 3, a int"),
        (lambda: run_of().next(-1), "count is -1, a int"),
        (lambda: run_of().back("1"), "count is '1', a str"),
        (lambda: run_of().here.state(3), "the run has 3 ranks, no rank 3"),
        (lambda: run_of().here.state("0"), "rank is '0', a str"),
        (lambda: run_of().goto(None), "where is None, a NoneType"),
    ]
    for call, text in bad:
        with pytest.raises(sf.ShardError, match=text):
            call()
    with pytest.raises(sf.ShardError, match="watch: it raises ZeroDivisionError") as caught:
        run_of(watch=lambda rank, x: 1 / 0)
    assert "on rank 0, with a f64[2, 2]" in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_worlds_without_values_and_meshes_of_ended_worlds_are_refused() -> None:
    with sf.fake_world(2, numerics=False):
        mesh = sf.make_mesh((2,), ("dp",))
        with pytest.raises(sf.FakeValueError, match="computes no values"):
            sf.inspect_ranks(sf.shard(summed, mesh, BATCH), X)
    with pytest.raises(sf.ShardError, match="a DeviceMesh outside of a fake world"):
        sf.first_nan(sf.shard(summed, mesh, BATCH), X)


def test_a_run_of_a_grid_names_both_axes() -> None:
    case = EQUAL["tensor parallel"]
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        step = sf.shard(case.step, mesh, (COLUMNS, ROWS, BATCH, BATCH))
        run = sf.inspect_ranks(step, *case.arguments(torch.float32))
    kinds = {text.split(",")[0] for op in run for text in op.on_the_way}
    assert kinds >= {"all_reduce over tp", "all_reduce over dp"}
    assert "f32[7@dp, 8@tp]" in {op.type for op in run}
    assert any(op.phase == "backward" for op in run)
