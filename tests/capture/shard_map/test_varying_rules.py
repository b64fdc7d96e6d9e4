"""Functions with a rule of the user's in per-rank code: what varies, and whose cotangents ranks
add up.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P

X = torch.linspace(-1, 2, 12, dtype=torch.float64).view(4, 3)
W = torch.linspace(0.5, 1, 12, dtype=torch.float64).view(3, 4)


def _summed() -> Any:
    """The identity, whose cotangent is summed."""
    fn = sf.custom_vjp(lambda x: x * 1)
    fn.defvjp(lambda x: (x * 1, None), lambda _, g: (sf.psum(g, "tp"),))
    return fn


def _total() -> Any:
    """The sum, whose cotangent is that of each."""
    fn = sf.custom_vjp(lambda x: sf.psum(x, "tp"))
    fn.defvjp(lambda x: (sf.psum(x, "tp"), None), lambda _, g: (g,))
    return fn


def _mlp(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (_total()(torch.tanh(_summed()(x) @ w) @ w.T) ** 2).sum()


def _plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((torch.tanh(x @ w) @ w.T) ** 2).sum()


def test_a_rule_with_collectives_is_the_derivative() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        mapped = sf.shard_map(_mlp, mesh, (P(), P(None, "tp")), P())
        found = sf.grad(mapped, (0, 1))(X, W)
    wanted = torch.func.grad(_plain, (0, 1))(X, W)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(sf.full(a), b)


def test_an_argument_without_a_summed_cotangent_is_summed() -> None:
    """What all ranks have has one gradient, as of any op."""
    fn = sf.custom_vjp(lambda x, w: sf.psum(x @ w, "tp"))
    forward = lambda x, w: (sf.psum(x @ w, "tp"), (x, w))
    fn.defvjp(forward, lambda kept, g: (g @ kept[1].T, kept[0].T @ g))
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        loss = lambda x, w: fn(x, w).sin().sum()
        mapped = sf.shard_map(loss, mesh, (P(), P(None, "tp")), P())
        found = sf.grad(mapped)(X, W)
    plain = lambda x: (x @ W[:, :2] + x @ W[:, 2:]).sin().sum()
    torch.testing.assert_close(sf.full(found), torch.func.grad(plain)(X))


def test_a_reduced_result_that_is_reduced_again_is_not_each_ranks() -> None:
    """A cotangent that has met a shard is a term already: its sum says nothing of the result."""
    fn = sf.custom_vjp(lambda x, w: sf.psum(x @ w, "tp"))

    def back(kept: Any, g: torch.Tensor) -> Any:
        x, w = kept
        return sf.psum(g @ w.T, "tp"), x.T @ g

    fn.defvjp(lambda x, w: (sf.psum(x @ w, "tp"), (x, w)), back)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        loss = lambda x, w: fn(x, w).sin().sum()
        mapped = sf.shard_map(loss, mesh, (P(), P(None, "tp")), P())
        found = sf.grad(mapped)(X, W)
    plain = lambda x: (x @ W[:, :2] + x @ W[:, 2:]).sin().sum()
    torch.testing.assert_close(sf.full(found), torch.func.grad(plain)(X))


def test_a_collective_in_a_rule_for_forward_mode_is_refused() -> None:
    fn = sf.custom_jvp(lambda x: x * 2)
    fn.defjvp(lambda xs, ts: (xs[0] * 2, sf.psum(ts[0], "tp")))
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        mapped = sf.shard_map(lambda x: fn(x).sum(), mesh, P(), P())
        with pytest.raises(sf.CaptureError, match="psum inside of it"):
            sf.grad(mapped)(X)
