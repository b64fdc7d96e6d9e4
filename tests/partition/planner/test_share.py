"""The share of an op's work that the busiest rank of an axis has."""

from __future__ import annotations

import torch

from shardfn.partition.planner.share import share_of

X = torch.empty(5, 12)


def test_an_even_shard_is_an_even_share() -> None:
    assert share_of([(X, (1,))], (3,), 0) == 1 / 3


def test_the_busiest_rank_has_a_full_chunk() -> None:
    assert share_of([(X, (0,))], (2,), 0) == 3 / 5
    assert share_of([(X, (0,))], (8,), 0) == 1 / 5
    assert share_of([(X, ((1, 4),))], (2,), 0) == 8 / 12


def test_a_second_axis_shares_what_the_first_left() -> None:
    assert share_of([(X, (1, 1))], (3, 2), 1) == 1 / 2
    assert share_of([(X, (0, 1))], (2, 4), 1) == 1 / 4


def test_the_first_sharded_tensor_counts() -> None:
    assert share_of([(X, ("R",)), (X, (1,))], (2,), 0) == 1 / 2
    assert share_of([(X, ("sum",)), (X, ("R",))], (2,), 0) == 1.0


def test_an_empty_dim_is_shared_like_one_element() -> None:
    assert share_of([(torch.empty(0), (0,))], (2,), 0) <= 1.0
