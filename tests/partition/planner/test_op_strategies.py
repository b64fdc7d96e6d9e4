"""The strategies that an op may take on the axis after those that are decided."""

from __future__ import annotations

import pytest
import torch

from shardfn.partition.planner.op_strategies import fitting, on_axis, share
from shardfn.partition.propagation.values import Placed
from tests.partition.planner.test_observed_walk import observed

X, W = torch.ones(8, 4), torch.ones(4, 6)


def offered(fn, args, ins, op: str, sizes=(2,)) -> list[object]:
    found = observed(fn, args, ins, sizes)
    (node,) = [n for n in found.nodes if n.name == op]
    chosen = found.chosen[node]
    before = Placed([()] * len(chosen.call.ins), [()] * len(chosen.call.outs))
    held = [{"R"}] * len(chosen.call.ins)
    placed = fitting(found.walk, node, chosen, before, held)
    return [on_axis(p, 0) for p in placed]


def test_a_product_may_be_sharded_on_every_factor() -> None:
    assert offered(lambda x, w: [x @ w], (X, W), [("R",), ("R",)], "mm") == [
        (("R", "R"), ("R",)),
        ((0, "R"), (0,)),
        (("R", 1), (1,)),
        ((1, 0), ("sum",)),
        (("sum", "R"), ("sum",)),
        (("R", "sum"), ("sum",)),
    ]


def test_a_strategy_that_gives_a_rank_more_than_twice_its_share_is_left_out() -> None:
    x = torch.ones(3, 16)
    row = offered(lambda x: [x.exp()], (x,), [("R",)], "exp", (8,))
    assert row == [(("R",), ("R",)), ((1,), (1,))], "3 rows over 8 ranks"
    row = offered(lambda x: [x.exp()], (x,), [("R",)], "exp", (4,))
    assert ((0,), (0,)) in row, "3 rows over 4 ranks"


def test_a_constant_other_than_zero_is_no_partial_sum() -> None:
    fn = lambda x: [x + torch.ones(8, 4)]
    assert (("sum", "sum"), ("sum",)) not in offered(fn, (X,), [("R",)], "add")
    zero = lambda x: [x + torch.zeros(8, 4)]
    assert (("sum", "sum"), ("sum",)) in offered(zero, (X,), [("R",)], "add")


def test_an_op_on_values_that_vary_is_computed_by_each_rank() -> None:
    found = observed(lambda x: [x.exp()], (X,), [("R",)])
    (node,) = [n for n in found.nodes if n.name == "exp"]
    chosen = found.chosen[node]
    chosen.values[0].varies = frozenset({"a"})
    placed = fitting(found.walk, node, chosen, Placed([()], [()]), [{"R"}])
    assert [on_axis(p, 0) for p in placed] == [(("R",), ("R",))]


@pytest.mark.parametrize(("marks", "wanted"), [((0,), 1 / 2), (("R",), 1.0)])
def test_the_share_of_a_placed_op(marks, wanted: float) -> None:
    found = observed(lambda x: [x.exp()], (X,), [("R",)])
    (node,) = [n for n in found.nodes if n.name == "exp"]
    call = found.chosen[node].call
    assert share(found.walk, call, Placed([marks], [marks]), 0) == wanted
