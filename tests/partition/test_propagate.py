"""A plan of a Program: what results are asked to be, what may be reduced, and which planner."""

from __future__ import annotations

import sys

import pieces
import pytest
import torch

import shardfn as sf
from shardfn.partition import propagate
from shardfn.types import MeshPlacements
from tests.support.stages.plans import planned, program_of, told

X, W = torch.ones(8, 4), torch.ones(4, 6)
AXES = pieces.mesh_axes((2,))


def test_results_are_brought_to_the_placements_that_are_asked_for() -> None:
    fn = lambda x, w: [x @ w]
    assert told(planned(fn, (X, W), [(0,), ("R",)], [("R",)])) == [
        "apply mm: 0, R -> 0",
        "redistribute output: 0 -> R by all_gather",
    ]


def test_an_unreduced_gradient_stays_so_through_linear_ops_and_is_refused_by_others() -> None:
    linear = program_of(lambda x: [x * 2], X)
    plan = propagate(linear, AXES, [("sum",)], [("sum",)], unreduced=[0])
    assert plan.outs[0].placements == ("sum",)
    other = program_of(lambda x: [x.exp()], X)
    with pytest.raises(sf.PlacementError, match="argument x0: the value is an unreduced"):
        propagate(other, AXES, [("sum",)], [None], unreduced=[0])


def embedded(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """Features that are sharded, where rows would be better from the start."""
    h = torch.nn.functional.embedding(x, w)
    for _ in range(3):
        h = (h.flatten(0, 1) @ v).tanh().view(h.shape)
        h = h.softmax(-1)
    return [h.sum()]


def test_a_global_plan_is_taken_where_it_sends_clearly_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = (torch.zeros(64, 32, dtype=torch.int64), torch.ones(50, 64), torch.ones(64, 64))
    ins: list[MeshPlacements] = [(0,), (1,), ("R",)]
    program = program_of(embedded, *args)
    sent = lambda plan: sum("by all_reduce" in line for line in told(plan))
    greedy = propagate(program, AXES, ins, [None], planner="greedy")
    small = propagate(program, AXES, ins, [None], planner="global")
    assert told(small) == told(greedy), "below the bytes that are worth a plan"
    module = sys.modules["shardfn.partition.propagate"]
    monkeypatch.setattr(module, "WORTH", 0.0)
    planned_at_once = propagate(program, AXES, ins, [None], planner="global")
    assert sent(planned_at_once) <= sent(greedy)
    assert planned_at_once.outs[0].placements == greedy.outs[0].placements
