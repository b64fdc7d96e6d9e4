"""Shards of arguments and global tensors of results, against torch.chunk."""

from __future__ import annotations

import pieces
import pytest
import torch

from shardfn.runtime.arguments.local_tensors import cut, join
from shardfn.types import Marks

SIZES = (2, 3)
AXES = pieces.mesh_axes(SIZES)
X = torch.arange(42, dtype=torch.float64).view(7, 6)
PLACED: list[Marks] = [("R", "R"), (0, "R"), (1, 0), (0, 0), ("R", 1), ((1, 3), 0)]


@pytest.mark.parametrize("marks", PLACED, ids=str)
def test_each_rank_has_the_chunk_that_torch_chunk_makes(marks: Marks) -> None:
    wanted = pieces.cut(X, marks, SIZES)
    for coordinate, chunk in zip(pieces.ranks(SIZES), wanted, strict=True):
        assert torch.equal(cut(X, marks, AXES, coordinate), chunk)


@pytest.mark.parametrize("marks", PLACED, ids=str)
def test_the_shards_of_all_ranks_are_the_global_tensor(marks: Marks) -> None:
    shards = [cut(X, marks, AXES, c) for c in pieces.ranks(SIZES)]
    assert torch.equal(join(shards, X.shape, marks, AXES), X)


REDUCED = {"sum": 0 + 1 + 2, "avg": 1, "max": 2, "min": 0}


@pytest.mark.parametrize("kind", REDUCED)
def test_terms_are_reduced_in_their_own_dtype(kind: str) -> None:
    axes = pieces.mesh_axes((3,))
    terms = [torch.full((2,), i, dtype=torch.float32) for i in range(3)]
    got = join(terms, (2,), (kind,), axes)
    assert got.tolist() == [REDUCED[kind]] * 2 and got.dtype == torch.float32


def test_a_sum_of_integers_keeps_its_width() -> None:
    terms = [torch.ones(2, dtype=torch.int32)] * 2
    assert join(terms, (2,), ("sum",), pieces.mesh_axes((2,))).dtype == torch.int32


def test_a_shard_is_new_memory_in_the_order_of_the_global_tensor() -> None:
    turned = X.t()
    shard = cut(turned, (0, "R"), AXES, (0, 0))
    assert shard.stride() == (1, 3) and shard.is_contiguous() is False
    shard.zero_()
    assert X[0, 1] == 1
    assert cut(X, ("R", "R"), AXES, (0, 0)) is X
    assert cut(X, (0, "R"), pieces.mesh_axes((1, 3)), (0, 0)).data_ptr() != 0
