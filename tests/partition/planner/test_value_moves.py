"""Values of the integer program: each reader finds its placement made, or pays for a move."""

from __future__ import annotations

import pieces
import pytest
import torch

from shardfn import _compat
from shardfn.partition.planner.integer_program import IntegerProgram
from shardfn.partition.planner.value_moves import IMPOSSIBLE, Supplies, Supply
from shardfn.partition.redistribute import route
from shardfn.types import MeshPlacements

AXES = pieces.mesh_axes((2,))
FAKE = _compat.FakeTensorMode().from_tensor(torch.ones(6, 4))
KEY = (torch.fx.Graph().placeholder("x"), 0)


def supply() -> Supply:
    return Supply(FAKE, AXES, 1.0)


def price(source: MeshPlacements, target: MeshPlacements) -> float:
    found = route((6, 4), 4, source, target, AXES)
    assert found is not None
    return found[0]


def cost(found: Supply) -> float:
    """The least cost of a program with this value alone."""
    program = IntegerProgram()
    supplies = Supplies(program)
    supplies.found[KEY] = found
    supplies.connect()
    values = program.solve()
    assert values is not None
    return sum(c for c, taken in zip(program.costs, values, strict=True) if taken)


def test_a_reader_of_a_placement_that_is_made_pays_nothing() -> None:
    found = supply()
    found.made[0,] = None
    found.reads.append(("forward", {(0,): None}))
    assert cost(found) == 0.0


@pytest.mark.parametrize("target", [("R",), (1,)])
def test_a_reader_of_another_placement_pays_for_the_move(target: MeshPlacements) -> None:
    found = supply()
    found.made[0,] = None
    found.reads.append(("forward", {target: None}))
    assert cost(found) == pytest.approx(price((0,), target))


def test_readers_of_one_phase_share_a_gather_and_those_of_two_do_not() -> None:
    found = supply()
    found.made[0,] = None
    found.reads += [("forward", {("R",): None})] * 2
    assert cost(found) == pytest.approx(price((0,), ("R",)))
    found = supply()
    found.made[0,] = None
    for phase in ("forward", "backward"):
        found.reads.append((phase, {("R",): None}))
    assert cost(found) == pytest.approx(2 * price((0,), ("R",)))


def test_a_shard_of_what_is_gathered_anyway_is_a_slice() -> None:
    found = supply()
    found.made[0,] = None
    found.reads.append(("forward", {("R",): None}))
    found.reads.append(("forward", {(1,): None}))
    wanted = price((0,), ("R",)) + price(("R",), (1,))
    assert cost(found) == pytest.approx(min(wanted, wanted + price((0,), (1,))))


def test_a_value_made_twice_costs_twice() -> None:
    found = supply()
    found.times = 2
    assert found.price((0,), ("R",)) == 2 * price((0,), ("R",))
    assert found.price(("R",), ("sum",)) == IMPOSSIBLE


def test_values_that_are_made_and_read_alike_have_one_description() -> None:
    first, second, other = supply(), supply(), supply()
    for found in (first, second, other):
        found.made[0,] = [3]
        found.reads.append(("forward", {("R",): (5,)}))
    other.reads.append(("backward", {("R",): (5,)}))
    assert first.description() == second.description() != other.description()


def test_where_a_value_is_made() -> None:
    found = supply()
    found.made[0,] = [3, 4]
    found.made["R",] = None
    assert found.made_at((0,)) == (3, 4)
    assert found.made_at(("R",)) is None, "always"
    assert found.made_at((1,)) == (), "never"
