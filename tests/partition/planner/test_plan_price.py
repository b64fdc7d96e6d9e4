"""The price of a plan, and when another plan is worth following."""

from __future__ import annotations

import pieces
import pytest
import torch

from shardfn import _compat
from shardfn.partition import plan as steps
from shardfn.partition.planner import op_cost
from shardfn.partition.planner.plan_price import PlanPrice, implicit_bytes, plan_price
from shardfn.partition.planner.start_costs import START
from shardfn.partition.redistribute import route
from tests.support.stages.graphs import calls, graph_of

AXES = pieces.mesh_axes((4,))
FIRST = PlanPrice(sent=100.0, nbytes=100.0, computed=50.0)


@pytest.mark.parametrize(
    ("other", "wanted"),
    [
        (PlanPrice(89.0, 89.0, 50.0), True),
        (PlanPrice(89.0, 95.0, 50.0), False),
        (PlanPrice(95.0, 89.0, 50.0), False),
        (PlanPrice(10.0, 10.0, 140.0), True),
        (PlanPrice(10.0, 10.0, 150.0), False),
        (FIRST, False),
    ],
)
def test_a_plan_is_below_if_it_sends_a_tenth_less_in_time_and_bytes_in_about_the_time(
    other: PlanPrice, wanted: bool
) -> None:
    assert other.is_below(FIRST) is wanted


def test_a_plan_is_faster_if_it_takes_a_twentieth_less_time_whatever_it_sends() -> None:
    assert PlanPrice(110.0, 200.0, 20.0).is_faster(FIRST)
    assert not PlanPrice(95.0, 0.0, 50.0).is_faster(FIRST), "about the time"


def test_prices_add_up_as_often_as_a_loop_runs() -> None:
    total = FIRST.plus(PlanPrice(1.0, 2.0, 3.0), 5)
    assert total == PlanPrice(105.0, 110.0, 65.0)
    assert total.total == 170.0


def sharded_sum(implicit: bool) -> tuple[steps.Plan, torch.fx.Graph]:
    """A product of a value, sharded over its contracted dim, that is all-reduced."""
    graph = graph_of(torch.mm, torch.ones(8, 8), torch.ones(8, 8))
    (mm,) = calls(graph, "mm")
    fake = _compat.FakeTensorMode().from_tensor(torch.ones(8, 8))
    x, w = steps.Slot(0, fake, (1,)), steps.Slot(1, fake, (0,))
    y, z = steps.Slot(2, fake, ("sum",)), steps.Slot(3, fake, ("R",))
    found = route((8, 8), 4, ("sum",), ("R",), AXES)
    assert found is not None
    reduce = steps.Redistribute(mm, y, z, found[1], implicit)
    return steps.Plan(AXES, (steps.Apply(mm, (x, w), (y,)), reduce), (x, w), (z,)), graph


def test_a_ring_all_reduce_sends_twice_its_bytes_less_one_part() -> None:
    plan, graph = sharded_sum(implicit=True)
    (mm,) = calls(graph, "mm")
    found = plan_price(plan, graph)
    sent = 2 * (3 / 4) * 8 * 8 * 4
    assert found.nbytes == sent + 1.0, "and one for the start, to count collectives"
    assert found.sent == sent + START
    assert found.computed == pytest.approx(op_cost.in_bytes(mm) / 4)


def test_only_what_no_placement_asks_for_is_unasked() -> None:
    assert implicit_bytes(*sharded_sum(implicit=False)) == 0.0
    assert implicit_bytes(*sharded_sum(implicit=True)) == 2 * (3 / 4) * 256 + 1.0
