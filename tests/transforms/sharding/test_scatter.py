"""psum_scatter, all_to_all and ppermute over the samples of a vmap, next to plain torch."""

from __future__ import annotations

import torch

import shardfn as sf

X = torch.arange(12.0, dtype=torch.float64).view(3, 4)
SQUARE = torch.arange(18.0, dtype=torch.float64).view(3, 3, 2)


def over(fn, x: torch.Tensor) -> torch.Tensor:
    return sf.vmap(fn, axis_name="i")(x)


def test_a_sum_is_scattered_one_element_to_each() -> None:
    got = over(lambda x: sf.psum_scatter(x, "i"), SQUARE)
    assert torch.equal(got, SQUARE.sum(0))
    tiled = over(lambda x: sf.psum_scatter(x, "i", tiled=True), SQUARE)
    assert torch.equal(tiled, SQUARE.sum(0).unsqueeze(1))


def test_an_exchange_is_a_transpose() -> None:
    got = over(lambda x: sf.all_to_all(x, "i", 0, 0), SQUARE)
    assert torch.equal(got, SQUARE.transpose(0, 1))


def test_a_permutation_sends_to_one_and_leaves_zeros() -> None:
    got = over(lambda x: sf.ppermute(x, "i", [(0, 1), (1, 2)]), X)
    assert torch.equal(got, torch.cat([torch.zeros(1, 4).double(), X[:2]]))
