"""The placements on one axis, chosen at once: no other choice is cheaper."""

from __future__ import annotations

import torch

from shardfn.partition.planner.axis_problem import AxisProblem
from shardfn.partition.planner.strategies import on_axis
from shardfn.partition.propagation.values import Placed
from tests.partition.planner.test_observed import observed


def solved(fn, args, ins, sizes=(2,)) -> dict[str, object]:
    """The placements of each op on the last axis, decided one axis after the other."""
    found = observed(fn, args, ins, sizes)
    decided = {
        node: Placed([()] * len(chosen.call.ins), [()] * len(chosen.call.outs))
        for node, chosen in found.chosen.items()
        if chosen.call.outs
    }
    for axis in range(len(sizes)):
        decided = AxisProblem(found, axis, decided).solve()
        assert decided is not None
    last = len(sizes) - 1
    return {node.name: on_axis(placed, last) for node, placed in decided.items()}


ARGS = torch.ones(64, 32), torch.ones(32, 32)


def test_placements_that_cost_nothing_are_kept() -> None:
    fn = lambda x, w: [(x @ w).tanh() @ w]
    assert solved(fn, ARGS, [(0,), ("R",)]) == {
        "mm": ((0, "R"), (0,)),
        "tanh": ((0,), (0,)),
        "mm_1": ((0, "R"), (0,)),
    }


def test_each_axis_is_decided_given_the_ones_before() -> None:
    fn = lambda x, w: [(x @ w).tanh()]
    assert solved(fn, ARGS, [(0, "R"), ("R", 1)], (2, 4)) == {
        "mm": (("R", 1), (1,)),
        "tanh": ((1,), (1,)),
    }


def test_the_smaller_value_moves() -> None:
    """Of a large activation and a small parameter that do not line up."""
    fn = lambda x, w: [(x @ w).exp()]
    args = torch.ones(6400, 32), torch.ones(32, 32)
    assert solved(fn, args, [(0,), (1,)])["mm"] == ((0, "R"), (0,))
