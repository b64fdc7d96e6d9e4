"""A plan as a value: the moves that become collectives, and the steps that results need."""

from __future__ import annotations

import pieces
import torch

from shardfn import _compat
from shardfn.partition import plan as steps
from shardfn.partition.redistribute import route
from shardfn.types import MeshPlacements

FAKE = _compat.FakeTensorMode().from_tensor(torch.ones(6))
AXES = pieces.mesh_axes((2, 3))


def node(phase: str = "forward") -> torch.fx.Node:
    made = torch.fx.Graph().placeholder("x")
    made.meta["phase"] = phase
    return made


def slot(number: int, *marks: object) -> steps.Slot:
    return steps.Slot(number, FAKE, marks)


def redistribute(
    source: steps.Slot, number: int, marks: MeshPlacements, phase: str = "forward"
) -> steps.Redistribute:
    found = route((6,), 8, source.placements, marks, AXES)
    assert found is not None
    target = steps.Slot(number, FAKE, marks)
    return steps.Redistribute(node(phase), source, target, found[1], False)


def test_equal_moves_of_one_value_in_one_phase_are_one_collective() -> None:
    x = slot(0, "sum", "sum")
    both = redistribute(x, 1, ("R", "R"))
    again = redistribute(x, 2, ("R", "sum"))
    backward = redistribute(x, 3, ("R", "sum"), "backward")
    plan = steps.Plan(AXES, (both, again, backward), (x,), (both.target,))
    sent = [(step.target.number, move.after) for step, move in steps.moves(plan)]
    assert sent == [(1, ("R", "sum")), (1, ("R", "R")), (3, ("R", "sum"))]


def test_only_steps_on_the_way_to_a_result_are_needed() -> None:
    x, y, z = slot(0, "R", "R"), slot(1, "R", "R"), slot(2, "R", "R")
    used = steps.Apply(node(), (x,), (y,))
    unused = steps.Apply(node(), (y,), (z,))
    check = steps.Apply(node(), (x,), ())
    assert steps.needed([used, unused, check], (y,)) == (used, check)
    assert steps.needed([used, unused], ()) == ()


def test_a_step_with_one_live_result_is_needed_with_all_that_it_reads() -> None:
    x, y = slot(0, "R", "R"), slot(1, "R", "R")
    pair = slot(2, "R", "R"), slot(3, "R", "R")
    first = steps.Apply(node(), (x,), (y,))
    second = steps.Apply(node(), (y,), pair)
    assert steps.needed([first, second], (pair[1],)) == (first, second)


def test_what_steps_read_and_make() -> None:
    x, y = slot(0, "R", "R"), slot(1, "R", "R")
    change, call = steps.Relabel(node(), x, y), steps.Apply(node(), (x,), (y,))
    fill = steps.Fill(node(), y, 0)
    assert [(s.read, s.made) for s in (change, call, fill)] == [
        ((x,), (y,)),
        ((x,), (y,)),
        ((), (y,)),
    ]
