"""Distributions: right at a million draws, equal on every mesh, differentiable as in torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P, random

KEY = random.key(20261122)
N = 1_000_000
# The largest distance of two distribution functions that chance leaves once in 10**6 runs.
KS_LIMIT = math.sqrt(-0.5 * math.log(0.5e-6) / N)


def _normal_cdf(x: torch.Tensor) -> torch.Tensor:
    return torch.special.ndtr(x)


def _truncated_cdf(x: torch.Tensor) -> torch.Tensor:
    low, high = _normal_cdf(torch.tensor([-1.0, 2.0], dtype=x.dtype))
    return (_normal_cdf(x) - low) / (high - low)


CONTINUOUS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "uniform": (lambda k, d: random.uniform(k, (N,), d), lambda x: x),
    "uniform from -2 to 3": (
        lambda k, d: random.uniform(k, (N,), d, -2.0, 3.0),
        lambda x: (x + 2) / 5,
    ),
    "normal": (lambda k, d: random.normal(k, (N,), d), _normal_cdf),
    "truncated_normal": (
        lambda k, d: random.truncated_normal(k, -1.0, 2.0, (N,), d),
        _truncated_cdf,
    ),
    "exponential": (lambda k, d: random.exponential(k, (N,), d), lambda x: -torch.expm1(-x)),
    "gumbel": (lambda k, d: random.gumbel(k, (N,), d), lambda x: torch.exp(-torch.exp(-x))),
    "gamma 0.3": (
        lambda k, d: random.gamma(k, 0.3, (N,), d),
        lambda x: torch.special.gammainc(torch.tensor(0.3, dtype=x.dtype), x),
    ),
    "gamma 4.5": (
        lambda k, d: random.gamma(k, 4.5, (N,), d),
        lambda x: torch.special.gammainc(torch.tensor(4.5, dtype=x.dtype), x),
    ),
    "beta 2, 3": (  # its distribution function is a polynomial
        lambda k, d: random.beta(k, 2.0, 3.0, (N,), d),
        lambda x: x**2 * (6 - 8 * x + 3 * x**2),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CONTINUOUS)
def test_a_million_draws_pass_kolmogorov_smirnov(name: str, dtype: torch.dtype) -> None:
    draw, cdf = CONTINUOUS[name]
    drawn = draw(KEY, dtype)
    assert drawn.dtype == dtype and drawn.isfinite().all()
    below = cdf(drawn.double().sort().values)
    steps = torch.arange(N + 1, dtype=torch.float64) / N
    distance = max((below - steps[:-1]).abs().max(), (steps[1:] - below).abs().max())
    assert distance < KS_LIMIT


W = torch.linspace(0.5, 3, 6 * 5, dtype=torch.float64).view(6, 5)
EVERY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "bits": lambda k, w: random.bits(k, (6, 5)) + 0 * w.to(torch.int32),
    "uniform": lambda k, w: w + random.uniform(k, (6, 5), torch.float64),
    "normal": lambda k, w: w * random.normal(k, (6, 5), torch.float64),
    "truncated_normal": lambda k, w: random.truncated_normal(k, -w, w, dtype=torch.float64),
    "bernoulli": lambda k, w: random.bernoulli(k, w / 3),
    "randint": lambda k, w: w * random.randint(k, (6, 5), 0, 9),
    "categorical": lambda k, w: random.categorical(k, w),
    "categorical over rows": lambda k, w: random.categorical(k, w, axis=0),
    "gumbel": lambda k, w: w + random.gumbel(k, (6, 5), torch.float64),
    "exponential": lambda k, w: w * random.exponential(k, (6, 5), torch.float64),
    "gamma": lambda k, w: random.gamma(k, w, dtype=torch.float64),
    "beta": lambda k, w: random.beta(k, w, 2 * w, dtype=torch.float64),
    "permutation": random.permutation,
    "permutation of columns": lambda k, w: random.permutation(k, w, axis=1),
    "permutation of each row": lambda k, w: random.permutation(k, w, axis=1, independent=True),
    "choice": lambda k, w: random.choice(k, w, (3, 2)),
    "choice without replacement": lambda k, w: random.choice(
        k, w, (4,), replace=False, p=w[:, 0] / w[:, 0].sum()
    ),
    "dropout": lambda k, w: random.dropout(k, w, 0.3),
    "split": lambda k, w: w * random.uniform(random.split(k, 3)[1], (6, 5), w.dtype),
    "fold_in": lambda k, w: w * random.normal(random.fold_in(k, 3), (6, 5), w.dtype),
}
EXACT = {"bits", "uniform", "bernoulli", "randint", "dropout", "split", "categorical"}


@pytest.mark.parametrize("name", EVERY)
def test_every_mesh_draws_what_one_device_draws(name: str) -> None:
    fn = EVERY[name]
    wanted = fn(KEY, W)
    for shape in ((1,), (2,), (3,), (8,), (2, 4), (2, 2, 2)):
        with sf.fake_world(math.prod(shape)):
            mesh = sf.make_mesh(shape, ("a", "b", "c")[: len(shape)])
            specs = [P("a"), P(None, "a"), P(("a", "b")), P("b", "a")]
            for spec in specs if len(shape) > 1 else specs[:2]:
                got = sf.full(sf.shard(fn, mesh, (P(), spec))(KEY, W))
                if name in EXACT:
                    assert torch.equal(got, wanted), spec
                assert_close(got, wanted, rtol=1e-14, atol=1e-14)


DIFFERENTIABLE = {
    "normal": lambda k, w: w + w * random.normal(k, (6, 5), torch.float64),
    "gamma": lambda k, w: random.gamma(k, w, dtype=torch.float64),
    "beta": lambda k, w: random.beta(k, w, 2 * w, dtype=torch.float64),
    "dropout": lambda k, w: random.dropout(k, w, 0.3) ** 2,
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_derivatives_are_those_of_the_draw(name: str) -> None:
    def loss(w: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (DIFFERENTIABLE[name](k, w) * W.cos()).sum()

    w = W.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(w, KEY), w)
    with simulated(a=2, b=2) as mesh:
        for fn in (loss, sf.checkpoint(loss)):
            grad = sf.shard(sf.grad(fn), mesh, (P("a", "b"), P()))
            assert_close(sf.full(grad(W, KEY)), wanted)


def test_keys_travel_through_scan_cond_and_vmap() -> None:
    def step(carry: torch.Tensor, k: torch.Tensor) -> Any:
        drawn = random.normal(k, (5,), torch.float64)
        return carry + drawn, drawn

    def walk(w: torch.Tensor, key: torch.Tensor) -> Any:
        end, rows = sf.scan(step, w[0], random.split(key, 4))
        other = sf.cond(
            w.sum() > 0,
            lambda k: random.uniform(k, (5,), torch.float64),
            lambda k: random.normal(k, (5,), torch.float64),
            random.fold_in(key, 9),
        )
        many = sf.vmap(lambda k: random.uniform(k, (5,), torch.float64))(
            random.split(random.fold_in(key, 10), 3)
        )
        return end, rows, other, many

    keys = random.split(KEY, 4)
    rows = torch.stack([random.normal(k, (5,), torch.float64) for k in keys])
    wanted = (
        W[0] + rows.sum(0),
        rows,
        random.uniform(random.fold_in(KEY, 9), (5,), torch.float64),
        torch.stack(
            [
                random.uniform(k, (5,), torch.float64)
                for k in random.split(random.fold_in(KEY, 10), 3)
            ]
        ),
    )
    with simulated(a=2) as mesh:
        got = sf.shard(walk, mesh, (P(None, "a"), P()))(W, KEY)
        for x, y in zip(sf.tree_map(sf.full, got), wanted, strict=True):
            assert_close(x, y)


def test_ranks_draw_apart_by_axis_index() -> None:
    with simulated(a=3) as mesh:

        def body(key: torch.Tensor) -> torch.Tensor:
            own = random.fold_in(key, sf.axis_index("a"))
            return random.uniform(own, (2,), torch.float64)

        f = sf.shard_map(body, mesh, (P(),), P("a"))
        wanted = [random.uniform(random.fold_in(KEY, i), (2,), torch.float64) for i in range(3)]
        assert torch.equal(sf.full(f(KEY)), torch.cat(wanted))
