"""A plan op by op, for one rank."""

from __future__ import annotations

import torch

from shardfn.inspect.verbose import verbose_text
from tests.support.stages.plans import planned

X, W = torch.ones(5, 4), torch.ones(4, 6)


def lines(plan, *coordinates: int) -> list[str]:
    return verbose_text(plan, "f", coordinates).splitlines()


def test_a_line_has_global_types_and_local_shapes() -> None:
    plan = planned(lambda x, w: [x @ w], (X, W), [(0, "R"), ("R", 1)], sizes=(2, 3))
    said = lines(plan, 1, 0)
    assert said[0] == "f on mesh (a=2, b=3), rank at (a=1, b=0): 1 steps"
    assert said[-1].startswith("  aten.mm.default(")
    assert "f32[5@a, 4] (2, 4)" in said[-1] and "f32[4, 6@b] (4, 2)" in said[-1]
    assert said[-1].endswith("-> f32[5@a, 6@b] (2, 2)   # model.py:mm")


def test_a_transfer_says_its_price_and_who_asked_for_it() -> None:
    plan = planned(lambda x: [x.exp().sum(0)], (X,), [(0,)])
    assert (
        "  all_reduce over a, 16 B, explicit: f32[4; sum@a] (4,) -> f32[4] (4,)"
        in (lines(plan, 0)[-1])
    )
    rolled = planned(lambda x: [x.roll(1, 0)], (X,), [(0,)])
    assert any("all_gather over a, 96 B, implicit: " in line for line in lines(rolled, 0))


def test_a_constant_and_a_mean_send_nothing() -> None:
    filled = planned(lambda x: [x + torch.ones(5, 4)], (X,), [(0,)])
    assert lines(filled, 1)[-2].startswith("  fill 1 -> f32[5@a, 4] (2, 4)")
    mean = planned(lambda x: [x * 2], (X,), [("avg",)], [("avg",)])
    assert sum("rescale" in line for line in lines(mean, 0)) == 2
