"""Terms of gradients: values that are only added and rearranged on the way to one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardfn.buckets import Wish
from shardfn.ops.placement import prim_align
from shardfn.schedule.bucketing.gradient_terms import served
from shardfn.types import Marks
from tests.support.stages.plans import planned

X = torch.ones(4, 4)
REPLICATED: Marks = ("R",)


def leaves(on_the_way: Any) -> dict[str, Any]:
    """The gradient that each op's result is a term of, by the name of the op."""

    def step(w: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        g = on_the_way(x.cos())
        return [prim_align(g, w, Wish("w", 1, 1).text)]

    plan = planned(step, (X, torch.ones(4, 4)), [REPLICATED] * 2, [REPLICATED])
    found = served(plan, [None])
    return {
        step.node.name: terms and [g.wish.leaf for g in terms]
        for step in plan.steps
        for terms in [found.get(step.made[0].number)]
    }


ONLY_ADDS = {
    "sums": lambda x: x + x.t(),
    "reductions": lambda x: x.sum(0, keepdim=True).expand(4, 4),
    "views": lambda x: x.reshape(16).view(4, 4),
    "numbers": lambda x: x * 0.5 / 3,
    "negatives": lambda x: -x - x,
}


@pytest.mark.parametrize("name", ONLY_ADDS)
def test_sums_and_rearrangements_lead_to_terms(name: str) -> None:
    assert set(map(str, leaves(ONLY_ADDS[name]).values())) == {"['w']"}


COMPUTES = {
    "products": lambda x: x * x.t(),
    "functions": lambda x: x.tanh(),
    "quotients of one": lambda x: 1 / x,
}


@pytest.mark.parametrize("name", COMPUTES)
def test_what_else_is_computed_makes_no_term(name: str) -> None:
    assert leaves(COMPUTES[name])["cos"] is None


def test_a_value_that_is_read_besides_is_no_term() -> None:
    def step(w: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        g = x.cos()
        return [prim_align(g.t(), w, Wish("w", 1, 1).text), g]

    plan = planned(step, (X, torch.ones(4, 4)), [REPLICATED] * 2)
    found = served(plan, [None, None])
    by_name = {s.node.name: found.get(s.made[0].number) for s in plan.steps}
    assert by_name["cos"] is None and by_name["t"] is not None


def test_a_term_of_two_gradients_is_a_term_of_both() -> None:
    def step(v: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        g = x.cos()
        return [prim_align(g.t(), v, Wish("v", 1, 1).text), prim_align(-g, w, Wish("w", 1, 1).text)]

    args = X, torch.ones(4, 4), torch.ones(4, 4)
    plan = planned(step, args, [REPLICATED] * 3)
    found = served(plan, [None, None])
    (cos,) = [s for s in plan.steps if s.node.name == "cos"]
    terms = found[cos.made[0].number]
    assert terms is not None and {g.wish.leaf for g in terms} == {"v", "w"}
