"""A value of a walk: its slots, which phase may read them, and its default placement."""

from __future__ import annotations

import pieces
import torch

from shardfn import _compat
from shardfn.partition import plan as steps
from shardfn.partition.propagation.values import Value, default_placements, is_partial
from shardfn.types import MeshPlacements

FAKE = _compat.FakeTensorMode().from_tensor(torch.ones(4, 6))
AXES = pieces.mesh_axes((2, 3))
NODE = torch.fx.Graph().placeholder("x")


def value(*placed: tuple[MeshPlacements, str | None], **fields: object) -> Value:
    slots = {marks: (steps.Slot(i, FAKE, marks), only) for i, (marks, only) in enumerate(placed)}
    return Value(FAKE, early=False, slots=slots, **fields)


def test_a_slot_of_one_phase_is_not_read_in_the_other() -> None:
    x = value(((0, "R"), None), (("R", "R"), "forward"))
    read = lambda phase: [slot.placements for slot in x.readable(phase)]
    assert read("forward") == [(0, "R"), ("R", "R")]
    assert read("backward") == [(0, "R")]


def test_a_constant_like_another_value_follows_it_but_not_its_partial_sums() -> None:
    like = value((("sum", "R"), None), ((0, "R"), None))
    zeros = Value(FAKE, early=False, fill=(NODE, 0), like=like)
    assert [slot.placements for slot in zeros.strategy_slots("forward")] == [(0, "R")]
    assert zeros.is_unmade and zeros.readable("forward") == []


def test_a_value_with_slots_is_made() -> None:
    assert not value((("R", "R"), None), fill=(NODE, 0)).is_unmade
    assert Value(FAKE, early=False, recipe=(NODE, ())).is_unmade
    assert not Value(FAKE, early=True).is_unmade


def test_the_default_placement_is_reduced_and_in_plain_chunks() -> None:
    assert default_placements(value((("sum", 1), None)), AXES) == ("R", 1)
    assert default_placements(value(((0, (1, 2)), None)), AXES) == (0, 1)
    assert default_placements(Value(FAKE, early=False, fill=(NODE, 1)), AXES) == ("R", "R")


def test_partial_placements() -> None:
    assert is_partial(("R", "max")) and not is_partial(("R", 0))
