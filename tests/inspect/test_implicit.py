"""Dispatch: what each op call is given, what its rule answers, what is sent for it, and what is
said of all three.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import models
import pytest
import schemes
import torch

import shardfn as sf
from shardfn import P
from shardfn.inspect.alternatives import Alternative
from shardfn.inspect.transfers import NO_RULE, NO_SHARDED_STRATEGY
from shardfn.partition import plan, rules
from shardfn.partition.rule_api.op_record import Op

aten = torch.ops.aten
X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
W = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
HERE = re.compile(re.escape(__file__) + r":\d+")


def sharded(fn: Callable[..., Any], placed: Any, **options: Any) -> Any:
    """A function sharded over two of the ranks."""
    return sf.shard(fn, sf.make_mesh((2, 3), ("dp", "tp")), placed, backend="aten", **options)


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with sf.fake_world(6):
        yield


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """What shardfn logs."""
    lines, log = [], logging.getLogger("shardfn")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield lines
    log.removeHandler(handler)
    log.setLevel(level)


@pytest.fixture
def no_rule_for_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(rules.OPS, aten.sort.default)


def sort(x: torch.Tensor) -> torch.Tensor:
    return x.sort(0)[0] * 2


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).relu()


def test_s8_1_one_record_of_an_op_call_with_placements_in_place_of_values() -> None:
    low = sharded(product, (P("dp"), P()), out_placements=P("dp")).lower(X, W)
    mm, relu = (step for step in low.partition.steps if isinstance(step, plan.Apply))
    assert [(tuple(s.value.shape), s.placements) for s in (*mm.ins, *mm.outs)] == [
        ((6, 4), (0, "R")),
        ((4, 4), ("R", "R")),
        ((6, 4), (0, "R")),
    ]
    assert relu.ins == mm.outs and relu.node.target is aten.relu.default
    assert mm.node.meta["source"].startswith(__file__)


def test_s8_1_one_record_of_what_a_rule_answers_priced_for_the_arguments_as_they_are() -> None:
    (transfer,) = sharded(sort, P("dp")).lower(X).implicit
    nbytes = X.numel() * X.element_size()
    assert [(a.ins, a.outs) for a in transfer.alternatives] == [
        (("R",), ("R", "R")),
        ((1,), (1, 1)),
    ]
    assert all(
        isinstance(a, Alternative) and a.sends[0] >= nbytes / 2 for a in transfer.alternatives
    )


def test_s8_2_the_cheapest_placement_is_taken_and_not_the_first() -> None:
    small, large = torch.ones(4, 2), torch.ones(64, 4)
    for placed, wanted in (((P("dp"), P("dp")), (0, "R")), ((P(None, "dp"), P("dp")), (1, 0))):
        low = sharded(lambda x, w: x @ w, placed).lower(large, small)
        (mm,) = (step for step in low.partition.steps if isinstance(step, plan.Apply))
        assert tuple(slot.placements[0] for slot in mm.ins) == wanted
        first = rules.find(aten.mm.default)(walked_call(low, mm))[0]
        assert first[0] == ("R", "R"), "the first choice gathers both"
        for t in low.implicit:
            assert t.alternatives[0].ins == wanted and t.alternatives[0].price == min(
                a.price for a in t.alternatives
            )


def walked_call(low: Any, step: plan.Apply) -> Any:
    ins, outs = tuple(s.value for s in step.ins), tuple(s.value for s in step.outs)
    return sf.partition.rule_api.strategy.OpCall(
        step.node.target, step.node.args, dict(step.node.kwargs), ins, outs
    )


@pytest.mark.usefixtures("no_rule_for_sort")
def test_s8_5_an_op_without_a_rule_is_computed_whole_sliced_again_and_its_price_reported(
    logged: list[str],
) -> None:
    step = sharded(sort, P(None, "dp"), out_placements=P(None, "dp"))
    assert torch.equal(sf.full(step(X)), sort(X))
    low = step.lower(X)
    (fallback,) = low.fallbacks
    assert (fallback.op, fallback.why, fallback.nbytes, fallback.arguments) == (
        "aten.sort.default",
        NO_RULE,
        192,
        ("self f64[6, 4@dp]",),
    )
    assert HERE.fullmatch(fallback.source)
    said = (
        "shard(sort): aten.sort.default(self f64[6, 4@dp]) at HERE is computed replicated, for "
        "192 B: it has no rule"
    )
    assert said in [HERE.sub("HERE", line) for line in logged]


@pytest.mark.usefixtures("no_rule_for_sort")
def test_s8_5_with_the_strict_setting_it_is_refused_with_op_placements_and_line() -> None:
    with pytest.raises(sf.PlacementError) as caught:
        sharded(sort, P(None, "dp"), implicit_comm="error")(X)
    lines = HERE.sub("HERE", str(caught.value)).splitlines()
    assert lines[1] == (
        "  all_gather of self over dp (192 B) for aten.sort.default at HERE: self is f64[6, "
        "4@dp]; replicated, self would need no transfer"
    )
    assert lines[2] == (
        "  aten.sort.default(self f64[6, 4@dp]) at HERE is computed replicated, for 192 B: it "
        "has no rule"
    )
    assert torch.equal(sf.full(sharded(sort, P(), implicit_comm="error")(X)), sort(X)), (
        "nothing is sent where nothing is cut"
    )


def test_s8_5_an_op_is_reported_once_for_each_line_with_all_that_it_costs() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = sf.constrain(x.sort(0)[0], P("dp"))
        return x.sort(0)[0]

    first, second = sharded(twice, P("dp")).lower(X).fallbacks
    assert (first.nbytes, second.nbytes, first.why) == (3 * 192, 192, NO_SHARDED_STRATEGY)


def test_s8_6_verbose_prints_every_op_with_placements_and_local_shapes_of_one_rank() -> None:
    low = sharded(lambda x, w: (x @ w).sort(0)[0], (P("dp"), P())).lower(
        torch.ones(5, 4), torch.ones(4, 3)
    )
    shown = [re.sub(r"   # \S+", "", line) for line in low.verbose(rank=4).splitlines()]
    assert shown == [
        "shard(<lambda>) on mesh (dp=2, tp=3), rank at (dp=1, tp=1): 3 steps",
        "  legend: n@axis: a dim of global size n, sharded over the mesh axis",
        "  aten.mm.default(self f32[5@dp, 4] (2, 4), mat2 f32[4, 3] (4, 3)) -> f32[5@dp, 3] (2, 3)",
        "  all_gather over dp, 72 B, implicit: f32[5@dp, 3] (2, 3) -> f32[5, 3] (5, 3)",
        "  aten.sort.default(self f32[5, 3] (5, 3)) -> f32[5, 3] (5, 3), i64[5, 3] (5, 3)",
    ]
    assert "(3, 4)" in low.verbose() and "# test_implicit.py:" in low.verbose()


def raising(call: Any) -> Any:
    raise IndexError("no such dim")


FAILING = {
    "raises": (raising, "it raises IndexError: no such dim"),
    "too few marks": (
        lambda call: [((0, 0), (0,))],
        (
            "the rule returns 2 placements for arguments and 1 for results, but the call has "
            "1 and 2: ((0, 0), (0,))"
        ),
    ),
    "no such dim": (
        lambda call: [((0,), (2, 0))],
        "the rule returns placements that do not fit [(6, 4)] -> [(6, 4), (6, 4)]: ((0,), (2, 0))",
    ),
    "no mark": (
        lambda call: [(("S",), ("S", "S"))],
        "the rule returns placements that do not fit [(6, 4)] -> [(6, 4), (6, "
        "4)]: (('S',), ('S', 'S'))",
    ),
    "nothing": (lambda call: [], "it gives no strategy"),
}


@pytest.mark.parametrize("case", list(FAILING))
def test_s8_7_a_rule_that_fails_reports_op_schema_and_cause(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, said = FAILING[case]
    monkeypatch.setitem(rules.OPS, aten.sort.default, Op(rule))
    with pytest.raises(sf.RuleError) as caught:
        sharded(sort, P("dp"))(X)
    lines = HERE.sub("HERE", str(caught.value)).splitlines()
    assert lines[0].startswith("shard(sort), op aten.sort.default: its rule ") and lines[
        0
    ].endswith(f"fails: {said}")
    assert lines[1:3] == [f"  schema {aten.sort.default._schema}", "  at: HERE"]
    assert HERE.fullmatch(caught.value.source) and caught.value.fix


def test_every_transfer_says_who_asked_and_agrees_with_the_collectives_of_the_program() -> None:
    for name, make in (("sort", lambda: sharded(sort, P("dp")).lower(X)), ("step", gpt)):
        low = make()
        said = sorted((t.kind, t.axis, t.nbytes, t.implicit) for t in low.transfers)
        assert said == sorted((c.kind, c.axis, c.nbytes, c.implicit) for c in low.collectives), name
    explicit = {t.op for t in low.transfers if not t.implicit}
    assert explicit <= {"gradient", "result"} and "gradient" in explicit
    assert all(t.alternatives for t in low.implicit) and not any(
        t.alternatives for t in low.transfers if not t.implicit
    )


def gpt() -> Any:
    params, (x, y) = models.gpt_params(), models.tokens(8)
    return sharded(models.STEPS["gpt"], (schemes.mixed(params), P("dp"), P("dp"))).lower(
        params, x, y
    )


def test_an_uneven_reduce_scatter_and_all_to_all_are_priced_as_they_are_sent() -> None:
    x = torch.ones(5, 7)
    moves = lambda x: (sf.constrain(x, P(None, "dp")), sf.constrain(x.sum(0), P("dp")))
    low = sharded(moves, P("dp")).lower(x)
    assert {t.kind for t in low.transfers} == {"all_to_all", "reduce_scatter"}
    assert [(t.op, t.nbytes) for t in low.transfers] == [
        ("constrain", c.nbytes) for c in low.collectives
    ]


def test_a_placement_that_is_named_as_sending_nothing_sends_nothing() -> None:
    ops = {  # name: the function, its placements, its arguments, which of them moves
        "sort": (sort, (P("dp"),), (X,), 0),
        "matmul": (product, (P("dp"), P("dp")), (X, W), 1),
        "cat": (lambda a, b: torch.cat([a, b], 1), (P("dp"), P(None, "dp")), (W, W), 1),
        "cumprod": (lambda x: torch.cumprod(x, 0), (P("dp"),), (X,), 0),
    }
    for name, (fn, placed, args, k) in ops.items():
        (transfer,) = sharded(fn, placed).lower(*args).implicit
        assert transfer.native, name
        for mark in transfer.native:
            other = P() if mark == "R" else P(*[None] * mark, "dp")
            low = sharded(fn, tuple(other if i == k else p for i, p in enumerate(placed))).lower(
                *args
            )
            assert not low.implicit, (name, mark)


def test_the_parts_of_an_op_that_is_written_out_are_priced_too() -> None:
    low = sharded(lambda x: torch.softmax(x, 0), P("dp")).lower(X)
    assert low.implicit and all(
        t.alternatives and t.source and HERE.fullmatch(t.source) for t in low.implicit
    )


def test_what_the_walk_weighs_is_noted_on_demand_only(monkeypatch: pytest.MonkeyPatch) -> None:
    walks = []
    monkeypatch.setattr(
        sf.runtime.stages.traced, "weighed_strategies", lambda *a, **k: walks.append(a) or {}
    )
    low = sharded(sort, P("dp")).lower(X)
    assert not walks
    assert low.implicit and walks


@pytest.mark.parametrize(
    ("fn", "kind", "op"),
    [
        (lambda x: torch.cumsum(x.sin(), 0), "all_gather", "cumsum"),
        (lambda x: torch.cummax(x.sin(), 0)[0], "all_gather", "cummax"),
    ],
)
def test_what_an_op_sends_in_steps_of_its_own_is_listed_for_it(
    fn: Callable[..., Any], kind: str, op: str
) -> None:
    long = torch.randn(600, 4, dtype=torch.float64)
    transfers = sharded(fn, P("dp")).lower(long).transfers
    assert {(t.kind, t.op, t.argument) for t in transfers} == {(kind, f"aten.{op}.default", "it")}
    with pytest.raises(sf.PlacementError, match=rf"{kind} of it over dp .* for aten\.{op}"):
        sharded(fn, P("dp"), implicit_comm="error").lower(long)


def test_an_attention_that_travels_in_a_ring_is_listed_for_it() -> None:
    q = torch.randn(1, 2, 6, 4)
    fn = lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    ring = sharded(fn, P(None, None, "dp"), attention={"dp": "ring"}).lower(q).transfers
    assert [t.kind for t in ring] == ["ppermute"]
    assert "attention" in ring[0].op and not ring[0].implicit
