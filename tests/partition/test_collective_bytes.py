"""The bytes of one collective: the full payload of a rank with full shards, padding included."""

from __future__ import annotations

import pieces
import pytest

from shardfn.partition.collective_bytes import nbytes
from shardfn.partition.redistribute import Move
from shardfn.types import MeshPlacements

HALO = (0, 1, 1, 2)  # one row from the rank before, two from the rank after
CASES: dict[str, tuple[str, MeshPlacements, MeshPlacements, int]] = {
    "an all-reduce sends the value": ("all_reduce", ("sum", "R"), ("R", "R"), 5 * 3),
    "of a shard of another axis": ("all_reduce", ("sum", 0), ("R", 0), 2 * 3),
    "an all-gather fills up the last chunk": ("all_gather", (0, "R"), ("R", "R"), 6 * 3),
    "the inner axis gathers a chunk": ("all_gather", (0, 0), (0, "R"), 3 * 3),
    "a reduce-scatter fills up too": ("reduce_scatter", ("sum", "R"), (0, "R"), 6 * 3),
    "an all-to-all fills up both dims": ("all_to_all", (0, "R"), (1, "R"), 3 * 4),
    "in units": ("all_gather", ((1, 3), "R"), ("R", "R"), 5 * 6),
    "a halo sends edges": ("halo", (0, "R"), (HALO, "R"), 3 * 3),
    "a permute sends the value": ("ppermute", ("R", 0), ("R", 0), 2 * 3),
}  # on a tensor of (5, 3), over axis a of 2 x 3


@pytest.mark.parametrize("name", CASES)
def test_the_payload_is_counted_in_elements(name: str) -> None:
    kind, before, after, wanted = CASES[name]
    axis = next((k for k in (0, 1) if before[k] != after[k]), 0)
    move = Move(kind, axis, before, after)
    axes = pieces.mesh_axes((2, 3))
    assert nbytes((5, 3), 8, move, axes) == 8 * wanted
    assert nbytes((5, 3), 2, move, axes) == 2 * wanted


def test_a_rank_with_a_shorter_shard_sends_less_of_a_value_and_as_much_of_a_chunk() -> None:
    axes = pieces.mesh_axes((2, 3))
    reduce = Move("all_reduce", 0, ("sum", 0), ("R", 0))
    assert nbytes((5, 3), 1, reduce, axes, (0, 2)) == 1 * 3
    gather = Move("all_gather", 0, (0, "R"), ("R", "R"))
    assert nbytes((5, 3), 1, gather, axes, (1, 0)) == 6 * 3


@pytest.mark.parametrize("rows, wanted", [(9, 5), (5, 5), (2, 2)])
def test_rows_count_as_the_most_that_ranks_send_on_average(rows: int, wanted: int) -> None:
    axes = pieces.mesh_axes((2, 3))
    move = Move("ragged_all_to_all", 0, ("R", 1), ("R", 1), rows=(0, rows))
    assert nbytes((5, 3), 8, move, axes) == 8 * wanted * 1


def test_a_slice_sends_nothing_and_has_no_payload() -> None:
    move = Move("slice", 0, ("R",), (0,))
    assert not move.sends
    with pytest.raises(KeyError):
        nbytes((5, 3), 8, move, pieces.mesh_axes((2,)))
