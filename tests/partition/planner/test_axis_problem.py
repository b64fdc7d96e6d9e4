"""The placements on one axis, chosen at once: no other choice is cheaper."""

from __future__ import annotations

import pytest
import torch

from shardfn.partition import layout
from shardfn.partition.planner import axis_problem
from shardfn.partition.planner.axis_problem import AxisProblem, undecided
from shardfn.partition.planner.op_strategies import on_axis
from tests.partition.planner.test_observed_walk import observed


def solved(fn, args, ins, sizes=(2,)) -> dict[str, object]:
    """The placements of each op on the last axis, decided one axis after the other."""
    found = observed(fn, args, ins, sizes)
    decided = undecided(found)
    for axis in range(len(sizes)):
        decided = AxisProblem(found, axis, decided).solve()
        assert decided is not None
    last = len(sizes) - 1
    return {node.name: on_axis(placed, last) for node, placed in decided.ops.items()}


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


def problem_of_a_merge() -> AxisProblem:
    """Dims are merged, the later one sharded: the result may be a strided shard."""
    fn = lambda x, w: [(x.reshape(32, 32) @ w).reshape(8, 4, 32).tanh()]
    args = torch.ones(8, 4, 32), torch.ones(32, 32)
    found = observed(fn, args, [("R",), ("R",)], (2,))
    return AxisProblem(found, 0, undecided(found))


def strided_shards(problem: AxisProblem) -> int:
    return sum(
        layout.block_count(mark) > 1
        for strategies in problem.strategies.values()
        for _, placed in strategies
        for marks in on_axis(placed, 0)
        for mark in marks
    )


def test_a_large_problem_has_no_strided_shards_but_those_of_the_walk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = problem_of_a_merge()
    assert strided_shards(whole)
    ways = whole.supplies.ways()
    monkeypatch.setattr(axis_problem, "MOST_WAYS", ways - 1)
    narrow = problem_of_a_merge()
    assert narrow.supplies.ways() < ways
    assert not strided_shards(narrow)
    assert list(map(str, narrow.strategies)) == list(map(str, whole.strategies))
    found = [problem.solve() for problem in (whole, narrow)]
    here, there = ([on_axis(x, 0) for x in each.ops.values()] for each in found if each)
    assert here == there


def test_a_problem_that_stays_too_large_is_not_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(axis_problem, "MOST_WAYS", 1)
    problem = problem_of_a_merge()
    assert problem.is_too_large
    assert problem.solve() is None
