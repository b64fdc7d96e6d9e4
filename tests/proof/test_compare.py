"""compare: equal programs differ nowhere, and one planted op is named with its line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import compared_steps as steps
import pytest
import torch
from compared_steps import BATCH, COLUMNS, EQUAL, GRID, PLANTS, ROWS, TRAINED, Case
from torch import Tensor

import shardfn as sf
from shardfn import P
from shardfn.proof.comparisons.compare import Comparison

HALVES = [torch.float32, torch.bfloat16]


def compared(*args: Any, **options: Any) -> Comparison:
    result = sf.compare(*args, **options)
    assert isinstance(result, Comparison)
    return result


def line_of(fn: Callable[..., Any], mark: str) -> str:
    """The file and line of a function that ends with a comment."""
    lines, start = inspect.getsourcelines(fn)
    (number,) = (i for i, text in enumerate(lines) if text.rstrip().endswith(f"# {mark}"))
    return f"{inspect.getsourcefile(fn)}:{start + number}"


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", EQUAL)
def test_equal_programs_under_other_layouts_differ_nowhere(name: str, dtype: torch.dtype) -> None:
    case = EQUAL[name]
    result = compared(case.step, *case.arguments(dtype), b=case.layout)
    assert result, result
    assert result.first is None and result.equal
    assert all(row.a and (row.b or name == "ring") for row in result.rows)
    assert "agree up to rounding" in str(result)


@pytest.mark.parametrize("kind", ["AdamW", "NAdam", "Adagrad"])
def test_parameters_of_one_shape_have_the_values_of_their_own_updates(kind: str) -> None:
    opt = sf.optim(getattr(torch.optim, kind), lr=0.01)
    x = torch.linspace(-1, 2, 30, dtype=torch.float64).view(5, 6)
    params = {name: x[k].clone() for k, name in enumerate("abc")}

    def step(params: Any, state: Any, x: Tensor) -> Any:
        loss = lambda p: (x * p["a"] + p["b"] * p["c"]).square().mean()
        return opt.update(params, sf.grad(loss)(params), state)

    layout = dict(mesh={"dp": 2}, in_placements=(P(), P(), P("dp")))
    result = compared(step, params, opt.init(params), x, b=layout)
    assert result, result
    updates = [row for row in result.rows if row.a and row.b]
    assert len(updates) > 3 * 5


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ["tensor parallel", "ring", "layer norm", "experts"])
def test_two_meshes_of_one_step_differ_nowhere(name: str, dtype: torch.dtype) -> None:
    case = EQUAL[name]
    one = {"mesh": {"dp": 3}, "in_placements": (P("dp"),) + (None,) * (len(case.shapes) - 1)}
    assert compared(case.step, *case.arguments(dtype, seed=1), a=one, b=case.layout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["data parallel", "heads", "experts", "convolution", "momentum"])
def test_a_smaller_dtype_is_only_rounding(name: str, dtype: torch.dtype) -> None:
    case = EQUAL[name]
    result = compared(case.step, *case.arguments(torch.float32), b={"dtype": dtype})
    assert result, result
    assert max(row.relative or 0.0 for row in result.rows) > 1e-4  # and it does round


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_op_of_another_version_is_named(name: str, dtype: torch.dtype) -> None:
    right, wrong = steps.planted(), steps.planted(**PLANTS[name])
    args = Case(right, TRAINED, {}).arguments(dtype)
    layout = steps.over(GRID, COLUMNS, ROWS, BATCH, BATCH)
    result = compared(right, *args, b={"fn": wrong, **layout})
    assert not result
    assert result.first is not None
    assert result.first.line == line_of(steps.planted, name.partition(",")[0]), result
    assert result.first.kind == "program" and result.first.side == "both"


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_version_with_no_planted_op_differs_nowhere(dtype: torch.dtype) -> None:
    right, same = steps.planted(), steps.planted()
    layout = steps.over(GRID, COLUMNS, ROWS, BATCH, BATCH)
    for seed in range(3):
        args = Case(right, TRAINED, {}).arguments(dtype, seed)
        result = compared(right, *args, b={"fn": same, **layout})
        assert result, result


@torch.library.custom_op("compared::centred", mutates_args=())
def centred(x: Tensor) -> Tensor:
    return x - x.mean(0, keepdim=True)


@torch.library.custom_op("compared::total", mutates_args=())
def total(x: Tensor) -> Tensor:
    return x.sum(0)


@torch.library.custom_op("compared::largest", mutates_args=())
def largest(x: Tensor) -> Tensor:
    return x.amax(0)


@torch.library.custom_op("compared::numbered", mutates_args=())
def numbered(x: Tensor) -> Tensor:
    return x + torch.arange(x.shape[0], dtype=x.dtype)[:, None]


centred.register_fake(torch.empty_like)
numbered.register_fake(torch.empty_like)
total.register_fake(lambda x: x.new_empty(x.shape[1:]))
largest.register_fake(lambda x: x.new_empty(x.shape[1:]))

Rule = Any
RULES: dict[str, tuple[Any, Rule, str]] = {
    "works along the dim": (centred, lambda call: [([0], [0]), (["R"], ["R"])], "op"),
    "says replicated": (total, lambda call: [([0], ["R"]), (["R"], ["R"])], "replicas"),
    "another reduction": (total, lambda call: [([0], ["max"]), (["R"], ["R"])], "op"),
    "adds maxima": (largest, lambda call: [([0], ["sum"]), (["R"], ["R"])], "op"),
    "counts rows": (numbered, lambda call: [([0], [0]), (["R"], ["R"])], "op"),
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", RULES)
def test_an_op_with_a_wrong_rule_is_named(name: str, dtype: torch.dtype) -> None:
    op, rule, kind = RULES[name]

    def step(w: Tensor, x: Tensor) -> Tensor:
        h = torch.relu(x @ w)
        h = op(h)  # wrong
        return (h * 2).square().sum()

    args = Case(step, ((4, 5), (6, 4)), {}).arguments(dtype)
    layout = steps.over(GRID, None, BATCH)
    with sf.rule(op, rule):
        result = compared(step, *args, b=layout)
    assert result.first is not None and not result
    assert result.first.line == line_of(step, "wrong")
    assert (result.first.kind, result.first.side) == (kind, "b")
    assert result.first.ranks
    assert len(result.differences) == 1  # the later ops carry it on
    assert compared(step, *args, b=layout)  # without the rule


def test_it_is_named_whichever_side_has_it() -> None:
    def step(x: Tensor) -> Tensor:
        return total(x).sum()

    args = Case(step, ((6, 4),), {}).arguments(torch.float64)
    wrong = steps.over({"dp": 2}, BATCH)
    right = steps.over({"dp": 2}, P(None, "dp"))
    with sf.rule(total, lambda call: [([0], ["R"]), ([1], [0]), (["R"], ["R"])]):
        result = compared(step, *args, a=wrong, b=right)
    assert result.first is not None
    assert (result.first.side, result.first.op, result.first.ranks) == ("a", "total", (1,))


def test_ranks_and_elements_that_differ() -> None:
    def step(x: Tensor) -> Tensor:
        return numbered(x)

    x = torch.zeros(5, 3, dtype=torch.float64)
    with sf.rule(numbered, RULES["counts rows"][1]):
        result = compared(step, x, b=steps.over({"dp": 2}, BATCH))
    first = result.first
    assert first is not None
    # rows 3 and 4 are the first and the second of rank 1
    assert (first.ranks, first.count, first.total) == ((1,), 6, 15)
    assert first.index in [(i, j) for i in (3, 4) for j in range(3)]
    assert (first.got, first.wanted) == (first.index[0] - 3.0, float(first.index[0]))
    assert (first.a, first.b) == ("f64[5, 3]", "f64[5@dp, 3]")
    assert first.phase == "forward"


def test_versions_that_are_written_otherwise_are_equal() -> None:
    def one(w: Tensor, x: Tensor) -> Any:
        return torch.softmax(x @ w, -1).sum(0), (x * 2).mean()

    def two(w: Tensor, x: Tensor) -> Any:
        h = w.T @ x.T
        e = (h - h.amax(0, keepdim=True)).exp()
        return (e / e.sum(0, keepdim=True)).sum(1), (x + x).sum() / x.numel()

    args = Case(one, ((4, 5), (6, 4)), {}).arguments(torch.float32)
    result = compared(one, *args, b={"fn": two})
    assert result, result
    assert any(op.startswith("exp") for op in result.only_b)


def test_a_version_without_an_op_is_named_by_that_op() -> None:
    def one(x: Tensor) -> Tensor:
        x = x * 3
        x = x.abs()  # lost
        return (x + 1).sum()

    def two(x: Tensor) -> Tensor:
        x = x * 3
        return (x + 1).sum()

    x = torch.tensor([1.0, -2.0, 3.0])
    result = compared(one, x, b={"fn": two})
    assert result.first is not None
    assert (result.first.op, result.first.line) == ("abs", line_of(one, "lost"))
    assert result.first.b == "" and "has no such op" in str(result)


def test_an_op_in_per_rank_code_is_named_with_its_ranks() -> None:
    def step(w: Tensor, x: Tensor) -> Tensor:
        def body(x: Tensor, w: Tensor) -> Tensor:
            y = torch.tanh(x @ w)
            y = y * factor  # factor
            return sf.psum(y, "tp")

        specs = (P("dp", "tp"), P("tp", None))
        return sf.shard_map(body, mesh, specs, P("dp", None))(x, w).sum(0)

    args = Case(step, ((4, 5), (6, 4)), {}).arguments(torch.float32)
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        layout = {"mesh": mesh, "in_placements": (None, BATCH)}
        factor = 1.5
        assert compared(step, *args, a=layout, b=layout)

        def other(w: Tensor, x: Tensor) -> Tensor:
            def body(x: Tensor, w: Tensor) -> Tensor:
                y = torch.tanh(x @ w)
                y = y * 1.6  # other factor
                return sf.psum(y, "tp")

            specs = (P("dp", "tp"), P("tp", None))
            return sf.shard_map(body, mesh, specs, P("dp", None))(x, w).sum(0)

        result = compared(step, *args, a=layout, b={"fn": other, **layout})
    assert result.first is not None
    assert result.first.line == line_of(other, "other factor")
    assert result.first.ranks == (0, 1, 2, 3)


def test_a_dtensor_whose_replicas_differ_is_an_argument_that_differs() -> None:
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("dp",))
        x = sf.from_local([torch.full((2,), float(i == 1)) for i in range(3)], mesh, P())
        result = compared(lambda x: x * 2, x, b={"mesh": mesh})
    assert result.first is not None
    assert (result.first.kind, result.first.op, result.first.ranks) == ("argument", "x", (1,))


def test_a_function_under_shard_brings_its_layout() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        case = EQUAL["tensor parallel"]
        sharded = sf.shard(case.step, mesh, case.layout["in_placements"])
        args = case.arguments(torch.float32)
        result = compared(sharded, *args)
        assert result and (result.a, result.b) == ("one device", "(dp=2, tp=2)")
        assert compared(sharded, *args, a={"planner": "greedy"}, b={})


def test_random_numbers_are_the_same_on_both_sides_and_none_are_used_up() -> None:
    case = EQUAL["random"]
    sf.random.state.seed(5)
    before = sf.random.state.get()
    result = compared(case.step, *case.arguments(torch.float32), b=case.layout)
    assert result
    after = sf.random.state.get()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_nothing_is_written_where_a_module_has_buffers() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    before = [x.clone() for x in module.buffers()]
    x = torch.arange(15.0).reshape(5, 3)
    assert compared(lambda x: module(x).sum(0), x, b=steps.over({"dp": 2}, BATCH))
    assert all(torch.equal(x, y) for x, y in zip(before, module.buffers(), strict=True))


def test_infinities_and_nans_are_equal_to_themselves() -> None:
    def step(x: Tensor) -> Any:
        return x.log(), (x - x.log()).sum(0), 1 / x

    x = torch.tensor([[0.0, -1.0, 2.0], [1.0, 0.0, -3.0]])
    assert compared(step, x, b=steps.over({"dp": 2}, BATCH))
    wrong = compared(step, x, b={"fn": lambda x: (x.log1p(), (x - x.log()).sum(0), 1 / x)})
    assert wrong.first is not None and wrong.first.op == "log1p"


def test_the_report_names_op_line_placements_ranks_and_elements() -> None:
    def step(x: Tensor) -> Tensor:
        return total(x).sum()  # here

    x = torch.arange(8.0).reshape(4, 2)
    with sf.rule(total, RULES["another reduction"][1]):
        result = compared(step, x, b=steps.over({"dp": 2}, BATCH))
    assert str(result) == "\n".join(
        [
            "compare(step), a: one device, b: (dp=2)",
            f"  first: total at {line_of(step, 'here')}, forward: in run b, the result is "
            "not what the op computes from its inputs on one device",
            "    a: f32[2]",
            "    b: f32[2; max@dp]",
            "    2 of 2 elements; the largest at (1,): got 12.0, needed 16.0",
            "    on ranks 0, 1",
        ]
    )
    assert repr(result) == str(result)
    head = result.table().split("\n")[0].split()
    assert head == ["x", "0.0e+00", "f32[4,", "2]", "|", "f32[4@dp,", "2]"]


def test_it_raises_where_it_is_asked_to() -> None:
    def step(x: Tensor) -> Tensor:
        return total(x)  # raised

    x = torch.arange(8.0).reshape(4, 2)
    with sf.rule(total, RULES["says replicated"][1]), pytest.raises(sf.DivergenceError) as caught:
        sf.compare(step, x, b=steps.over({"dp": 2}, BATCH), raises=True)
    assert caught.value.source == line_of(step, "raised")
    assert "ranks of run b have different replicas of the result" in str(caught.value)
    assert sf.compare(step, x, b=steps.over({"dp": 2}, BATCH), raises=True)


def test_records_are_frozen() -> None:
    result = compared(lambda x: x * 2, torch.ones(2), b=steps.over({"dp": 2}, BATCH))
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        result.name = "x"  # pyright: ignore[reportAttributeAccessIssue]


def doubled(x: Tensor) -> Tensor:
    return x * 2


X = torch.ones(4)
BAD: list[tuple[str, tuple[Any, ...], Mapping[str, Any], str]] = [
    ("no function", (3, X), {"b": {}}, "step is int"),
    ("no side", (doubled, X), {}, "neither a nor b is given"),
    ("not a dict", (doubled, X), {"b": 3}, "argument b: it is int"),
    ("an unknown option", (doubled, X), {"b": {"meshes": 2}}, "unknown options: 'meshes'"),
    ("not a mesh", (doubled, X), {"b": {"mesh": 4}}, "mesh is 4"),
    ("an empty mesh", (doubled, X), {"b": {"mesh": {}}}, "mesh is {}"),
    ("no ranks", (doubled, X), {"b": {"mesh": {"dp": 0}}}, "mesh is {'dp': 0}"),
    ("not a dtype", (doubled, X), {"b": {"dtype": "bf16"}}, "dtype is 'bf16'"),
    ("a dtype of ints", (doubled, X), {"b": {"dtype": torch.int8}}, "dtype is torch.int8"),
    ("not a version", (doubled, X), {"b": {"fn": 3}}, "fn is int"),
    ("placements alone", (doubled, X), {"b": {"in_placements": P("dp")}}, "without a mesh"),
    ("nothing to cast", (doubled, 3), {"b": {"dtype": torch.float16}}, "no argument is a floating"),
    ("another flag", (doubled, X), {"b": {}, "raises": 1}, "raises is 1"),
    ("one path", ("a.digests",), {}, "needed: the paths of two folders of digests"),
    ("no folder", ("none/a", "none/b"), {}, "the folder does not exist"),
    ("other placements", (doubled, X), {"b": steps.over({"dp": 2}, P("tp"))}, "tp"),
    (
        "the arguments differ from those that the program was compiled for",
        (doubled, X, X),
        {"b": {"dtype": torch.float16}},
        "too many positional arguments",
    ),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case[0])
def test_bad_input_is_named(case: Any) -> None:
    _, args, options, text = case
    with pytest.raises((sf.ShardError, TypeError)) as caught:
        sf.compare(*args, **options)
    assert text in str(caught.value)


def test_a_mesh_outside_of_its_world_is_refused() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
    with pytest.raises(sf.ShardError, match="a DeviceMesh outside of a fake world"):
        sf.compare(doubled, X, b={"mesh": mesh})


def test_a_world_of_another_size_or_without_values_is_refused() -> None:
    with (
        sf.fake_world(3),
        pytest.raises(sf.ShardError, match="has 2 ranks, but the fake world has 3"),
    ):
        sf.compare(doubled, X, b=steps.over({"dp": 2}, BATCH))
    with (
        sf.fake_world(2, numerics=False),
        pytest.raises(sf.FakeValueError, match="numerics=False computes no values"),
    ):
        sf.compare(doubled, X, b=steps.over({"dp": 2}, BATCH))


@pytest.fixture(autouse=True)
def _state() -> Iterator[None]:
    before = sf.random.state.get()
    yield
    sf.random.state.set(before)
