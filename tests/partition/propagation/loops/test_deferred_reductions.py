"""Gradients inside a loop: reduced in a run that needs them, else once, after the loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P

F64 = torch.float64
G = torch.Generator().manual_seed(2)
W = torch.randn(4, 3, generator=G, dtype=F64)
X = torch.randn(3, 6, 4, generator=G, dtype=F64)  # three microbatches of six rows


def loss(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ w).square().mean()


def added(w: Tensor, xs: Tensor) -> Tensor:
    return sf.scan(lambda c, x: (c + sf.grad(loss)(w, x), None), torch.zeros_like(w), xs)[0]


def scaled(w: Tensor, xs: Tensor) -> Tensor:
    return sf.scan(lambda c, x: (c - sf.grad(loss)(w, x) / 3, None), torch.zeros_like(w), xs)[0]


def with_loss(w: Tensor, xs: Tensor) -> Any:
    def run(c: Any, x: Tensor) -> Any:
        value, g = sf.value_and_grad(loss)(w, x)
        return (c[0] + value, c[1] + g), None

    return sf.scan(run, (torch.zeros((), dtype=F64), torch.zeros_like(w)), xs)[0]


def returned(w: Tensor, xs: Tensor) -> Tensor:
    return sf.map(lambda x: sf.grad(loss)(w, x), xs)


def descended(w: Tensor, xs: Tensor) -> Tensor:
    return sf.scan(lambda w, x: (w - 0.1 * sf.grad(loss)(w, x), None), w, xs)[0]


def with_momentum(w: Tensor, xs: Tensor) -> Any:
    def run(c: Any, x: Tensor) -> Any:
        w, m = c
        m = 0.9 * m + sf.grad(loss)(w, x)
        return (w - 0.1 * m, m), None

    return sf.scan(run, (w, torch.zeros_like(w)), xs)[0]


def squared(w: Tensor, xs: Tensor) -> Any:
    def run(c: Any, x: Tensor) -> Any:
        g = sf.grad(loss)(w, x)
        return (c[0] + g, c[1] + g * g), None

    return sf.scan(run, (torch.zeros_like(w), torch.zeros_like(w)), xs)[0]


def decayed(w: Tensor, xs: Tensor) -> Tensor:
    return sf.scan(
        lambda c, x: (c + (sf.grad(loss)(w, x) + 0.01 * w), None), torch.zeros_like(w), xs
    )[0]


ONCE, EACH = 1, 3
CASES = {
    added: ONCE,
    scaled: ONCE,
    with_loss: 2,
    returned: ONCE,
}  # with_loss: the loss and the gradient, once each
CASES |= {descended: EACH, with_momentum: EACH, squared: EACH, decayed: EACH}


@functools.cache
def on_one_device(fn: Callable[..., Any]) -> Any:
    return fn(W, X)


@pytest.mark.parametrize("fn", CASES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("placement", [P(), P("dp")], ids=["replicated", "fully sharded"])
def test_a_gradient_inside_a_scan_is_reduced_as_often_as_it_is_needed(
    fn: Any, placement: P
) -> None:
    wanted = on_one_device(fn)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        sharded = sf.shard(fn, mesh, (placement, P(None, "dp")), backend="aten")
        got = sharded(W, X)
        torch.testing.assert_close(sf.full(got), wanted, rtol=1e-12, atol=1e-12)
        said = str(sharded.lower(W, X)).splitlines()[0]
        if placement == P():
            assert f"{CASES[fn]} all_reduce over dp" in said
        elif fn in (added, scaled):
            assert "1 reduce_scatter over dp" in said
            assert got.placements[0].is_shard(0)


def test_a_sum_whose_terms_a_later_and_longer_axis_shards_is_reduced_once() -> None:
    def products(xs: Tensor, ys: Tensor) -> Tensor:
        start = torch.zeros(6, 16, dtype=F64)
        return sf.scan(lambda c, row: (c + row[0].T @ row[1], None), start, (xs, ys))[0]

    xs, ys = (
        torch.randn(3, 4, 6, generator=G, dtype=F64),
        torch.randn(3, 4, 16, generator=G).double(),
    )
    with sf.fake_world(16):
        mesh = sf.make_mesh((2, 8), ("dp", "tp"))
        ins = (P(None, "dp"), P(None, "dp", "tp"))
        sharded = sf.shard(products, mesh, ins, P(None, "tp"), backend="aten")
        torch.testing.assert_close(
            sf.full(sharded(xs, ys)), products(xs, ys), rtol=1e-12, atol=1e-12
        )
        assert [x.kind for x in sharded.lower(xs, ys).collectives] == ["all_reduce"]
