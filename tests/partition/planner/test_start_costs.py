"""Which collectives start ahead: those of parameters and gradients."""

from __future__ import annotations

import attrs
import pieces
import torch

from shardfn.ops.placement import prim_align
from shardfn.partition import plan as steps
from shardfn.partition.planner.start_costs import (
    START,
    parameter_slots,
    parameters,
    with_start_costs,
)
from shardfn.types import Cost
from tests.support.stages.graphs import graph_of

AXES = pieces.mesh_axes((2, 3))
STEP = graph_of(
    lambda w, x, g: [x @ w.t(), prim_align(g + 0, w, "")],
    torch.ones(2, 3),
    torch.ones(5, 3),
    torch.ones(2, 3),
)


def test_a_collective_that_waits_pays_its_start_and_one_ahead_does_not() -> None:
    assert with_start_costs(AXES, is_ahead=False).costs == (Cost(start=START),) * 2
    assert with_start_costs(AXES, is_ahead=True).costs == (Cost(start=1.0),) * 2


def test_links_that_are_known_count() -> None:
    links = Cost(start=7.0, byte=2.0), Cost(start=9.0, byte=1.0)
    known = attrs.evolve(AXES, costs=links)
    assert with_start_costs(known, is_ahead=False).costs == links
    assert [c.byte for c in with_start_costs(known, is_ahead=True).costs] == [2.0, 1.0]
    assert [c.start for c in with_start_costs(known, is_ahead=True).costs] == [1.0, 1.0]


def test_the_parameters_are_those_with_a_gradient_and_their_rearrangements() -> None:
    assert [node.name for node in parameters(STEP)] in (["w_1", "t"], ["t", "w_1"])


def test_the_slots_of_parameters_are_followed_through_moves() -> None:
    holders = STEP.find_nodes(op="placeholder")
    (turned,) = [n for n in STEP.nodes if n.name == "t"]
    (mm,) = [n for n in STEP.nodes if n.name == "mm"]
    w, x, g, t, gathered, y = (
        steps.Slot(i, node.meta["val"], ("R", "R"))
        for i, node in enumerate((*holders, turned, turned, mm))
    )
    plan = steps.Plan(
        AXES,
        (
            steps.Apply(turned, (w,), (t,)),
            steps.Redistribute(turned, t, gathered, (), False),
            steps.Apply(mm, (x, gathered), (y,)),
        ),
        (w, x, g),
        (y,),
    )
    assert parameter_slots(plan, STEP) == {w.number, t.number, gathered.number}
