"""Sums of several terms: the Partial ones are added before they are reduced."""

from __future__ import annotations

import torch

import shardfn as sf
from shardfn import P

random = torch.Generator().manual_seed(0)
X = torch.randn(4, 6, generator=random, dtype=torch.float64)
W = torch.randn(6, 5, generator=random, dtype=torch.float64)
B = torch.randn(4, 5, generator=random, dtype=torch.float64)


def test_partial_terms_around_another_one_are_reduced_once() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return x @ w + b + (2 * x) @ w  # Partial, replicated, Partial

    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("tp",))
        f = sf.shard(fn, mesh, (P(None, "tp"), P("tp"), P()), P())
        assert f.lower(X, W, B).text().count("all_reduce[sum, tp]") == 1
        torch.testing.assert_close(sf.full(f(X, W, B)), fn(X, W, B))


def test_a_sum_that_something_else_reads_is_not_put_off() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        first = x @ w + b
        return first + (2 * x) @ w * first.sum()

    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("tp",))
        f = sf.shard(fn, mesh, (P(None, "tp"), P("tp"), P()), P())
        torch.testing.assert_close(sf.full(f(X, W, B)), fn(X, W, B))
