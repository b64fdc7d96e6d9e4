"""A walk over a Program: what each kind of node becomes in the plan."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from tests.support.stages.plans import planned, told

X = torch.ones(4, 6)


def test_a_constant_is_made_at_the_placement_of_its_reader() -> None:
    plan = planned(lambda x: [x + torch.ones(4, 6)], (X,), [(1,)])
    assert told(plan) == ["fill ones:  -> 1", "apply add: 1, 1 -> 1"]


def test_an_op_with_several_results_makes_a_slot_for_each() -> None:
    plan = planned(lambda x: list(torch.max(x, 1)), (X,), [(0,)])
    assert told(plan) == ["apply max_1: 0 -> 0, 0"]
    assert [slot.placements for slot in plan.outs] == [(0,), (0,)]


def test_a_result_is_reduced_unless_it_is_to_stay_partial() -> None:
    fn = lambda x: [x.sum(0)]
    assert told(planned(fn, (X,), [(0,)]))[-1] == ("redistribute output: sum -> R by all_reduce")
    assert told(planned(fn, (X,), [(0,)], [("sum",)])) == ["apply sum_1: 0 -> sum"]


def test_a_result_that_is_not_a_sum_cannot_stay_partial() -> None:
    with pytest.raises(sf.PlacementError, match="cannot stay sum over a"):
        planned(lambda x: [x.exp()], (X,), [(0,)], [("sum",)])


def test_an_input_that_is_a_mean_is_a_sum_inside() -> None:
    plan = planned(lambda x: [x * 3], (X,), [("avg",)], [("avg",)])
    assert told(plan) == [
        "rescale x_1: avg -> sum",
        "apply mul: sum -> sum",
        "rescale output: sum -> avg",
    ]


def test_steps_that_no_result_needs_are_left_out() -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        x.sum(0).exp()
        return [x + 1]

    assert told(planned(fn, (X,), [(0,)])) == ["apply add: 0 -> 0"]


def test_a_parameter_gathered_in_the_forward_is_gathered_again_in_the_backward() -> None:
    fn = lambda w, x: [x @ w, x @ w]
    args = torch.ones(6, 40), X
    one = planned(fn, args, [(0,), (0,)], sizes=(2,))
    both = planned(fn, args, [(0,), (0,)], sizes=(2,), backward=["mm_1"])
    gathers = lambda plan: sum("by all_gather" in line for line in told(plan))
    assert (gathers(one), gathers(both)) == (1, 2)
