"""Strategies in the units of values that are sharded already."""

from __future__ import annotations

import pytest
import torch
from worlds import simulated

import shardfn as sf
from shardfn import P
from shardfn.partition.propagation.strategy_units import extended, in_units


def test_a_strategy_is_offered_in_every_unit_in_which_an_input_is_sharded() -> None:
    choice = ((0, "R"), (0,))
    assert in_units(choice, [{(0, 4), 0}, {"R"}], strided=lambda: True) == [
        ((0, "R"), (0,)),
        (((0, 4), "R"), ((0, 4),)),
    ]


def test_units_count_on_the_dim_of_the_strategy_alone() -> None:
    choice = ((0, "R"), (0,))
    assert in_units(choice, [{(1, 4), "sum"}, {(0, 7)}], strided=lambda: True) == [choice]


def test_a_unit_of_the_strategy_divides_that_of_the_value() -> None:
    split = (((0, 3),), (0,))
    assert in_units(split, [{(0, 6)}], strided=lambda: True) == [
        (((0, 3),), (0,)),
        (((0, 6),), ((0, 2),)),
    ]
    assert in_units(split, [{(0, 4)}], strided=lambda: True) == [split]


def test_a_zigzag_turns_within_the_blocks_of_a_strategy() -> None:
    keep = ((0, "R"), (1,))
    assert in_units(keep, [{(0, 1, -2)}, {"R"}], strided=lambda: True) == [
        (((0, 1, -2), "R"), ((1, 1, -2),)),
        keep,
    ]
    split = (((0, 1, 2),), (1,))
    assert in_units(split, [{(0, 1, -2)}], strided=lambda: True) == [split]
    assert in_units(split, [{(0, 1, -4)}], strided=lambda: True) == [
        (((0, 1, -4),), ((1, 1, -2),)),
        split,
    ]
    assert in_units(keep, [{(0, 1, -2)}, {"R"}], strided=lambda: False) == [keep]
    own = (((0, 1, -2),), (0,))
    assert in_units(own, [{(0, 1, -2), (0, 1, 2), 0}], strided=lambda: True) == [own]
    assert in_units(own, [{(0, 1, -6)}], strided=lambda: True) == [
        own,
        (((0, 1, -6),), ((0, 1, 3),)),
    ]


def test_one_more_axis_in_the_simplest_placements() -> None:
    assert extended((4, 6), (0,), 1, (2, 3)) == (0, 1)
    assert extended((4, 6), ("R",), (1, 2), (2, 3)) == ("R", 1), "in plain chunks"
    assert extended((4, 6), ("R",), (1, 3), (2, 4)) == ("R", (1, 3))


def test_placements_that_do_not_go_together() -> None:
    assert extended((4, 6), ("sum",), "max", (2, 3)) is None
    assert extended((4, 6), ("sum",), "sum", (2, 3)) == ("sum", "sum")
    assert extended((4, 6), ("R",), (1, 4), (2, 3)) is None, "6 is no multiple of 4"


def test_uneven_blocks_that_only_a_later_axis_makes_chunks_need_that_axis() -> None:
    assert extended((7,), (), (0, 1, 2), (5, 2)) == ((0, 1, 2),), "the axis of 2 may shard it too"
    assert extended((7,), ((0, 1, 2),), 0, (5, 2)) == ((0, 1, 2), 0)
    assert extended((7,), ((0, 1, 2),), "R", (5, 2)) is None
    assert extended((7,), ((0, 1, 2),), "sum", (5, 2)) is None


@pytest.mark.parametrize(("axes", "sizes"), [("ba", (5, 2)), ("ab", (4, 2)), ("ba", (2, 3))])
def test_products_of_uneven_shards_over_two_axes_in_another_order(
    axes: str, sizes: tuple[int, int]
) -> None:
    made = torch.Generator().manual_seed(0)
    shapes = ((7, 7), (12, 7), (7, 3))
    args = [torch.randn(*s, dtype=torch.float64, generator=made) for s in shapes]
    step = sf.grad(lambda w, x, u: (x @ w @ u).square().mean(), (0, 1, 2))
    with simulated(**dict(zip(axes, sizes, strict=True))) as mesh:
        placements = (P(("a", "b")), P(), P(None, "a"))
        found = sf.shard(step, mesh, placements)(*args)
        for x, expected in zip(found, step(*args), strict=True):
            torch.testing.assert_close(sf.full(x), expected)
