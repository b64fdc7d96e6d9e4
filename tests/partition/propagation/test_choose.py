"""The cheapest strategy of an op, axis by axis."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from shardfn.partition.rule_api import registry
from shardfn.types import MeshPlacements
from tests.support.stages.plans import planned, told

X, W = torch.ones(8, 4), torch.ones(4, 6)
FREE: dict[str, tuple[MeshPlacements, MeshPlacements, str]] = {
    "rows": ((0,), ("R",), "apply mm: 0, R -> 0"),
    "columns": (("R",), (1,), "apply mm: R, 1 -> 1"),
    "contracted": ((1,), (0,), "apply mm: 1, 0 -> sum"),
    "replicated": (("R",), ("R",), "apply mm: R, R -> R"),
}


@pytest.mark.parametrize("name", FREE)
def test_a_strategy_that_moves_nothing_is_taken(name: str) -> None:
    x, w, line = FREE[name]
    outs = [None] if name != "contracted" else [("sum",)]
    assert told(planned(lambda x, w: [x @ w], (X, W), [x, w], outs)) == [line]


def test_axes_are_independent() -> None:
    plan = planned(lambda x, w: [x @ w], (X, W), [(0, "R"), ("R", 1)], sizes=(2, 3))
    assert told(plan) == ["apply mm: 0|R, R|1 -> 0|1"]


def test_of_two_inputs_the_smaller_one_moves() -> None:
    big = torch.ones(80, 4)
    plan = planned(lambda x, w: [x @ w], (big, W), [(0,), (1,)])
    assert told(plan) == ["redistribute mm: 1 -> R by all_gather (implicit)", "apply mm: 0, R -> 0"]


def test_one_value_as_two_arguments_moves_once() -> None:
    plan = planned(lambda x: [torch.dot(x, x)], (torch.ones(6),), [("R",)])
    assert told(plan) == ["apply dot: R, R -> R"]
    square = planned(lambda x: [x @ x], (torch.ones(6, 6),), [(0,)])
    assert told(square)[0] == "redistribute mm: 0 -> R by all_gather (implicit)"
    assert told(square)[1:] == ["apply mm: 0, R -> 0"]


def test_a_partial_sum_passes_through_linear_ops_and_is_reduced_before_others() -> None:
    fn = lambda x, w: [((x @ w) * 2).exp()]
    assert told(planned(fn, (X, W), [(1,), (0,)])) == [
        "apply mm: 1, 0 -> sum",
        "apply mul: sum -> sum",
        "redistribute exp: sum -> R by all_reduce (implicit)",
        "apply exp: R -> R",
    ]


def test_a_fallback_gathers_computes_and_leaves_replicated() -> None:
    plan = planned(lambda x: [x.roll(1, 0)], (X,), [(1,)])
    assert told(plan) == [
        "redistribute roll: 1 -> R by all_gather (implicit)",
        "apply roll: R -> R",
    ]


def test_a_rule_whose_strategies_fit_nowhere_is_refused() -> None:
    entry = registry.Registered(torch.ops.aten.roll.default, lambda call: [(((0, 3),), ((0, 3),))])
    registry.add(entry)
    try:
        with pytest.raises(sf.RuleError) as caught:
            planned(lambda x: [x.roll(1, 0)], (X,), [("R",)])
    finally:
        registry.remove(entry)
    assert "fails: none of the op's sharding strategies fits on axis a" in str(caught.value)
