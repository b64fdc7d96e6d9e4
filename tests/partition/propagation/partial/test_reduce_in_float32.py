"""Sums of half precision over ranks are as exact as on one device, and what is sent says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks

import shardfn as sf
from shardfn import P, Partial

HALVES = (torch.bfloat16, torch.float16)
G = torch.Generator().manual_seed(7)
MILLION = torch.rand(1_000_003, generator=G)
ROWS = torch.rand(131, 5, generator=G)
W = torch.rand(131, 3, generator=G)

Fn = Callable[..., torch.Tensor]
USES: dict[str, Fn] = {
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "sum over a dim": lambda x: x.sum(0),
    "kept dim, rearranged": lambda x: x.sum(0, keepdim=True).mT[1:],
    "sum of sums": lambda x: x.sum(0).sum(),
    "added and scaled": lambda x: x.sum() * 0.5 - (2 * x).sum() / 16,
    "read twice": lambda x: x.sum(0) + x.sum(0).sin(),
    "variance": lambda x: x.var(),
    "norm": lambda x: x.norm(),
}


def ulps(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The greatest distance from the exact value, in units of its last place."""
    unit = torch.finfo(got.dtype).eps * exact.abs()
    return ((got.double() - exact).abs() / unit).max().item()


@pytest.mark.parametrize("ranks", [64])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_sum_over_ranks_is_as_exact_as_on_one_device(
    dtype: torch.dtype, use: str, ranks: int
) -> None:
    fn, x = USES[use], ROWS.to(dtype)
    exact = fn(x.double())
    with sf.fake_world(ranks):
        mesh = sf.make_mesh((ranks,), ("dp",))
        got = sf.full(sf.shard(fn, mesh, (P("dp"),), backend="aten")(x))
    assert got.dtype == dtype
    assert ulps(got, exact) <= max(ulps(fn(x), exact), 0.51)


def test_a_million_elements_on_64_ranks() -> None:
    x = MILLION.bfloat16()
    exact = x.double().sum()
    x[0] += (exact.bfloat16().double() - exact).bfloat16()  # a sum near a bfloat16
    exact = x.double().sum()
    with sf.fake_world(64):
        mesh = sf.make_mesh((64,), ("dp",))
        total = sf.shard(torch.sum, mesh, (P("dp"),), backend="aten")
        relative = (sf.full(total(x)).double() - exact).abs() / exact
        assert [c.nbytes for c in total.lower(x).collectives] == [4]
        assert "all_reduce over dp: 4 B" in str(sf.explain(total, x))
    assert relative <= 5e-4


def test_terms_of_a_product_are_added_in_float32() -> None:
    x, w = ROWS.bfloat16(), W.bfloat16()
    product = lambda x, w: x.mT @ w
    exact = product(x.double(), w.double())
    with sf.fake_world(64):
        mesh = sf.make_mesh((64,), ("dp",))
        sharded = sf.shard(product, mesh, (P("dp"), P("dp")), backend="aten")
        (sum_of_terms,) = sharded.lower(x, w).collectives
        assert sum_of_terms.nbytes == 4 * 5 * 3
        assert ulps(sf.full(sharded(x, w)), exact) <= 0.75


def test_two_axes_are_reduced_before_the_cast() -> None:
    x = torch.rand(67, 9, generator=G).bfloat16()
    with sf.fake_world(32):
        mesh = sf.make_mesh((8, 4), ("dp", "tp"))
        total = sf.shard(torch.sum, mesh, (P("dp", "tp"),), backend="aten")
        assert ulps(sf.full(total(x)), x.double().sum()) <= 0.51
        assert [c.nbytes for c in total.lower(x).collectives] == [4, 4]


def test_what_would_send_64_kib_more_is_sent_as_it_is() -> None:
    x = torch.rand(3, 2**15, generator=G).bfloat16()
    over_rows = lambda x: x.sum(0)
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("dp",))
        sharded = sf.shard(over_rows, mesh, (P("dp"),), backend="aten")
        (large,) = sharded.lower(x).collectives
        (small,) = sharded.lower(x[:, 1:]).collectives
    assert (large.nbytes, small.nbytes) == (2 * 2**15, 4 * (2**15 - 1))


def test_a_result_that_stays_partial_and_a_gradient_keep_their_dtype() -> None:
    x = ROWS.bfloat16()
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("dp",))
        stays = sf.shard(torch.sum, mesh, (P("dp"),), Partial(), backend="aten")
        assert stays(x).dtype == torch.bfloat16
        assert not stays.lower(x).collectives
        bias = sf.bucketed_grad(lambda b, x: (x + b).square().sum())
        step = sf.shard(bias, mesh, (P(), P("dp")), backend="aten")
        sent = sorted(c.nbytes for c in step.lower(x[0], x).collectives)
    assert sent == [4, 2 * 5]  # the loss, and the gradient


def test_a_sum_carried_by_a_loop_is_reduced_once() -> None:
    def total(x: torch.Tensor) -> torch.Tensor:
        add = lambda carry, row: (carry + row.sum(), None)
        return sf.scan(add, x.new_zeros(()), x)[0]

    x = torch.rand(4, 67, generator=G).bfloat16()
    with sf.fake_world(8):
        mesh = sf.make_mesh((8,), ("dp",))
        sharded = sf.shard(total, mesh, (P(None, "dp"),), backend="aten")
        assert len(sharded.lower(x).collectives) == 1
        got = sf.full(sharded(x))
    assert ulps(got, x.double().sum()) <= 4


def test_the_collective_of_per_rank_code_has_the_dtype_that_it_was_given() -> None:
    x = ROWS.bfloat16()
    body = lambda x: sf.psum(x.sum(), "dp")
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("dp",))
        mapped = sf.shard_map(body, mesh, (P("dp"),), P())
        (sent,) = sf.shard(mapped, mesh, backend="aten").lower(x[:129]).collectives
    assert sent.nbytes == 2


def _on_ranks() -> list[Any]:
    mesh = sf.make_mesh((2,), ("dp",))
    x = MILLION.bfloat16()
    total = sf.shard(torch.sum, mesh, (P("dp"),), backend="aten")
    rows = sf.shard(lambda x: x.sum(0), mesh, (P("dp"),), backend="aten")
    return [sf.full(total(x)), sf.full(rows(ROWS.bfloat16()))]


def test_real_ranks_answer_as_one_device() -> None:
    x = MILLION.bfloat16()
    for total, rows in run_ranks(2, _on_ranks):
        assert ulps(total, x.double().sum()) <= 0.51
        assert ulps(rows, ROWS.bfloat16().double().sum(0)) <= 0.51
