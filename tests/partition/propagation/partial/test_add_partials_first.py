"""Sums of several terms, of which some are Partial: reduced once, and right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P

G = torch.Generator().manual_seed(3)
X = torch.randn(3, 6, generator=G, dtype=torch.float64)
W = torch.randn(6, 5, generator=G, dtype=torch.float64)
R = torch.randn(3, 5, generator=G, dtype=torch.float64)


def _times(k: int) -> Any:
    return lambda x, w: (x * k) @ w


# (function, how many all-reduces its sum sends)
SUMS: dict[str, tuple[Any, int]] = {
    "a residual first": (
        lambda x, w, r: r.sin() + _times(1)(x, w) + _times(2)(x, w) + _times(3)(x, w),
        1,
    ),
    "a residual between": (
        lambda x, w, r: _times(1)(x, w) + r.sin() + (_times(2)(x, w) + r.cos()),
        1,
    ),
    "a sum that others read too": (
        lambda x, w, r: (y := r.sin() + _times(1)(x, w)) + _times(2)(x, w) + y.exp(),
        2,
    ),
    "twice the same term": (lambda x, w, r: (y := _times(1)(x, w)) + r.sin() + y, 1),
    "other factors": (
        lambda x, w, r: torch.add(r.sin() + _times(1)(x, w), _times(2)(x, w), alpha=3),
        2,
    ),
    "other shapes": (lambda x, w, r: r.sin() + _times(1)(x, w) + _times(2)(x, w).sum(0), 2),
}


@pytest.mark.parametrize("case", SUMS)
@pytest.mark.parametrize("n", [2, 4])
def test_partial_terms_are_added_before_they_are_reduced(case: str, n: int) -> None:
    fn, reductions = SUMS[case]
    with sf.fake_world(n):
        mesh = sf.make_mesh((n,), ("a",))
        sharded = sf.shard(fn, mesh, (P(None, "a"), P("a"), P()), P(), backend="aten")
        low = sharded.lower(X, W, R)
        assert [c.kind for c in low.collectives] == ["all_reduce"] * reductions
        torch.testing.assert_close(sf.full(sharded(X, W, R)), fn(X, W, R), rtol=1e-12, atol=1e-12)


def test_gradients_of_such_sums() -> None:
    fn = lambda x, w, r: (SUMS["a residual between"][0](x, w, r) ** 2).sum()
    step = sf.grad(fn, argnums=(0, 1, 2))
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("a",))
        sharded = sf.shard(step, mesh, (P(None, "a"), P("a"), P()), backend="aten")
        torch.testing.assert_close(sf.full(sharded(X, W, R)), step(X, W, R), rtol=1e-12, atol=1e-12)
