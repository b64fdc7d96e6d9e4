"""A scatter_reduce of sharded sources reduces on each rank, and sends the result alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.testing import assert_close

import shardfn as sf
from shardfn import P

F64 = torch.float64
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(1001, dtype=F64, generator=GENERATOR)
X[9] = X[7]  # a tie
AT = torch.randint(0, 40, (1001,), generator=GENERATOR)
AT[9] = AT[7]
W = torch.randn(50, dtype=F64, generator=GENERATOR)  # ten elements without sources
PLACED = P("a"), P("a"), P()


def scattered(how: str, include_self: bool) -> Callable[..., torch.Tensor]:
    return lambda x, at, w: w.scatter_reduce(0, at, x, how, include_self=include_self)


@pytest.mark.parametrize("how", ["sum", "mean", "amax", "amin"])
@pytest.mark.parametrize("include_self", [True, False])
def test_sources_of_several_ranks_are_not_gathered(how: str, include_self: bool) -> None:
    fn = scattered(how, include_self)
    loss = lambda x, at, w: (fn(x, at, w).square() * w).sum()
    leaves = X.clone().requires_grad_(), W.clone().requires_grad_()
    expected = torch.autograd.grad(loss(leaves[0], AT, leaves[1]), leaves)
    odd = X.clone()
    odd[3], odd[5] = torch.nan, -torch.inf
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("a",))
        run = sf.shard(fn, mesh, PLACED, backend="aten")
        assert "all_gather" not in str(run.lower(X, AT, W))
        assert_close(sf.full(run(X, AT, W)), fn(X, AT, W))
        assert_close(sf.full(run(odd, AT, W)), fn(odd, AT, W), equal_nan=True)
        gradients = sf.shard(sf.grad(loss, argnums=(0, 2)), mesh, PLACED, backend="aten")
        assert_close(tuple(sf.full(gradients(X, AT, W))), expected)


def test_the_largest_source_of_each_element_costs_one_all_reduce_of_the_result() -> None:
    with sf.fake_world(3):
        run = sf.shard(scattered("amax", True), sf.make_mesh((3,), ("a",)), PLACED)
        assert "1 all_reduce over a, 400 B" in str(run.lower(X, AT, W))
