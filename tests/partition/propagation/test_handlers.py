"""Values between forward and backward: cotangents, and residuals that wait for a token."""

from __future__ import annotations

import torch

from shardfn.ops.placement import AFTER, prim_cotangent
from tests.support.stages.plans import planned, told

X = torch.ones(4, 4)


def test_a_cotangent_has_the_placement_of_its_result_reduced() -> None:
    fn = lambda x, w: [prim_cotangent(x @ w, 0) * 2]
    partial = planned(fn, (X, torch.ones(4, 4)), [(1,), (0,)])
    ((number, slot),) = partial.cotangents
    assert (number, slot.placements) == (0, ("R",)), "of a Partial sum: reduced"
    sharded = planned(fn, (X, torch.ones(4, 4)), [(0,), ("R",)])
    assert [slot.placements for _, slot in sharded.cotangents] == [(0,)]


def test_a_residual_after_a_token_keeps_every_placement() -> None:
    fn = lambda x, token: [AFTER(x, token).cos()]
    plan = planned(fn, (X, torch.ones(())), [(0,), ("R",)], backward=["after", "cos"])
    assert told(plan) == ["apply after: 0, R -> 0", "apply cos: 0 -> 0"]


def test_a_constant_waits_for_nothing() -> None:
    fn = lambda x, token: [AFTER(torch.zeros(4, 4), token) + x]
    plan = planned(fn, (X, torch.ones(())), [(0,), ("R",)], backward=["after", "add"])
    assert not any(" after:" in line for line in told(plan))
