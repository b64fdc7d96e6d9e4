"""The placements that a free argument may have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.partition.auto.free_arguments import (
    Contradiction,
    FreeArguments,
    data_parallel,
    free_arguments_of,
    fully_sharded,
    shards,
)
from shardfn.types import MeshAxes, MeshPlacements
from tests.partition.auto.test_parameter_groups import PARAMS, X, momentum

AXES = MeshAxes(("dp", "tp"), (2, 3))


def unknowns(given: dict[str, MeshPlacements]) -> FreeArguments:
    program = sf.jit(momentum).trace(PARAMS, PARAMS, X).program
    rows = [given.get(path) for path in program.in_paths]
    return free_arguments_of(program, AXES, rows, [None] * len(program.out_paths))


def by_name(found: FreeArguments, marks: Any) -> dict[str, MeshPlacements]:
    return {node.name: m for node, m in zip(found.holders, marks, strict=True)}


@pytest.mark.parametrize(
    ("shape", "before", "sizes", "dims"),
    [
        ((6, 2), (), (3,), [0]),  # fewer elements than ranks
        ((7, 8), (), (4,), [0, 1]),  # 7 elements as 2, 2, 2, 1
        ((5, 4), (), (4,), [1]),  # 5 elements as 2, 2, 1, 0: too uneven
        ((12,), (0,), (4, 3), [0]),  # chunks of 3, one element each
        ((12,), (0,), (4, 4), []),
        ((), (), (2,), []),
        ((8,), (), (1,), []),
    ],
)
def test_dims_that_are_long_enough_may_be_sharded(
    shape: Any, before: Any, sizes: Any, dims: Any
) -> None:
    found = shards(torch.empty(shape), before, sizes)
    assert found == [(*before, "R"), *[(*before, dim) for dim in dims]]


def test_a_parameter_follows_its_state_where_only_that_is_placed() -> None:
    found = unknowns({"m['v']": (1, "R")})
    v = found.holders[0]
    assert found.fixed(v) == (1, "R")
    assert found.candidates(v, ()) == [(1,)]
    assert found.candidates(v, (1,)) == [(1, "R")]
    assert found.fixed(found.holders[1]) is None


def test_states_in_several_placements_contradict() -> None:
    def other(p: Any, m: Any, n: Any, x: torch.Tensor) -> Any:
        return momentum(p, sf.tree_map(torch.add, m, n), x)

    program = sf.jit(other).trace(PARAMS, PARAMS, PARAMS, X).program
    given: dict[str, MeshPlacements] = {"m['v']": (1, "R"), "n['v']": (0, "R")}
    rows = [given.get(path) for path in program.in_paths]
    with pytest.raises(Contradiction) as error:
        free_arguments_of(program, AXES, rows, [None] * len(program.out_paths))
    assert error.value.args == ("p['v']", {(1, "R"): "m['v']", (0, "R"): "n['v']"})


def test_textbook_placements_keep_what_is_given() -> None:
    found = unknowns({"p['w']": ("R", 1)})
    data = data_parallel(found)
    assert data[:4] == [("R", "R"), ("R", 1), ("R", "R"), ("R", 1)]
    assert data[4] == (0, "R")  # 4 rows on 2 x 3 ranks
    full = fully_sharded(found, (0,))
    assert full == [(0, "R"), ("R", 1), (0, "R"), ("R", 1), (0, "R")]
