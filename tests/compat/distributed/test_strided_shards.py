"""Whether DTensor's strided shards are those of axes that shard a dim one after the other."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.tensor import Shard

from shardfn import _compat

UNLIKE = {(3, 2): {7, 13, 19}, (2, 3): set(), (4, 2): {9, 17}, (2, 2): set()}


def by_torch(size: int, a: int, b: int) -> list[list[int]]:
    """The elements of each rank of a mesh (a, b) whose second axis shards the dim first."""
    outer, _ = _compat.strided_shard(0, b)._split_tensor(torch.arange(size), a, with_padding=False)
    return [
        part.tolist() for x in outer for part in Shard(0)._split_tensor(x, b, with_padding=False)[0]
    ]


def in_turn(size: int, a: int, b: int) -> list[list[int]]:
    """The same, by chunks of chunks."""

    def chunk(x: torch.Tensor, n: int, number: int) -> torch.Tensor:
        parts = x.chunk(n)
        return parts[number] if number < len(parts) else x[:0]

    every = itertools.product(range(a), range(b))
    x = torch.arange(size)
    return [chunk(chunk(x, b, j), a, i).tolist() for i, j in every]


@pytest.mark.parametrize("mesh", UNLIKE, ids=str)
def test_it_is_what_torch_does(mesh: tuple[int, int]) -> None:
    a, b = mesh
    marks = ((0, 1, b), 0)
    unlike = {n for n in range(1, 20) if not _compat.is_in_order(n, 0, marks, mesh)}
    assert unlike == UNLIKE[mesh]
    for size in range(1, 20):
        is_equal = by_torch(size, a, b) == in_turn(size, a, b)
        assert is_equal == (size not in unlike)


def test_other_dims_play_no_part() -> None:
    assert _compat.is_in_order(5, 1, (0, 1), (2, 2))
    assert _compat.is_in_order(5, 1, (0, 0), (2, 2))
