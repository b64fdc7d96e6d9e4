"""Compiled values have the layouts of torch's ops, whatever ops Inductor decomposes them into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P
from shardfn._compat.strides import with_strides_of
from tests.support.ranks import run_ranks

F64 = torch.float64
X = torch.arange(24.0, dtype=F64).reshape(4, 6)
# each is the only tensor of its concatenation that has elements, and its strides are kept
ALONE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "beside a tensor of size 0": lambda x: torch.cat([x.new_empty(0), x.mT]),
    "beside one without rows": lambda x: torch.cat([x.new_empty(0, 4), x.mT]),
    "by itself": lambda x: torch.cat([x.mT]),
    "in another dtype": lambda x: torch.cat([x.new_empty(0), x.float().mT]).double(),
    "of three dims": lambda x: torch.cat([x.new_empty(0), x.reshape(2, 3, 4).permute(2, 0, 1)], 1),
}  # fmt: skip
READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a view": lambda x: x.view(3, 8) * 2,
    "flat": lambda x: x.flatten().cumsum(0),
    "as_strided": lambda x: x.as_strided((3, 5), (5, 1), 2) * 2,
    "as_strided_scatter": lambda x: (
        torch.as_strided_scatter(x, x.new_ones(3, 5), (3, 5), (5, 1), 2) * 2
    ),
    "view_as_complex": lambda x: torch.view_as_complex(x.view(12, 2)).abs(),
    "another dtype": lambda x: x.view(torch.int64).sum(0) * 1,
    "the result": lambda x: x,
    "attention": lambda x: x.view(3, 2, 4) @ x.view(3, 4, 2),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("alone", ALONE)
def test_compiled_it_is_what_torch_computes(alone: str, read: str) -> None:
    def f(x: torch.Tensor) -> Any:
        return READS[read](ALONE[alone](x))

    wanted = f(X)
    found = sf.jit(f, backend="inductor")(X)
    assert torch.equal(found, wanted) and found.stride() == wanted.stride()


@pytest.mark.parametrize("alone", ALONE)
def test_its_gradient_is_torchs(alone: str) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return READS["attention"](ALONE[alone](x).sin()).square().sum()

    wanted = torch.func.grad(loss)(X)
    torch.testing.assert_close(sf.jit(sf.grad(loss), backend="inductor")(X), wanted)


def of_shards(x: torch.Tensor) -> torch.Tensor:
    joined = torch.cat([x.new_empty(0), x.mT])
    return joined.as_strided((3, 5), (5, 1), 2) * 2 + joined.reshape(3, 8).sum()


def _on_a_rank() -> torch.Tensor:
    mesh = sf.make_mesh((2,), ("dp",), device_type="cpu")
    step = sf.shard(of_shards, mesh, (P("dp"),), backend="inductor")
    return sf.full(step(X))


def test_on_real_ranks() -> None:
    for found in run_ranks(2, _on_a_rank):
        torch.testing.assert_close(found, of_shards(X))


@pytest.mark.parametrize("read", ["flat", "as_strided"])
def test_code_for_many_sizes_is_right(read: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return READS[read](torch.cat([x.new_empty(0), x.mT]))

    step = sf.jit(f, backend="inductor", dynamic=True)
    for rows in range(3, 7):
        x = torch.arange(rows * 6.0, dtype=F64).reshape(rows, 6)
        assert torch.equal(step(x), f(x))


def test_a_tensor_takes_the_strides_of_another_of_its_shape() -> None:
    like = X.mT
    moved = with_strides_of(X.mT.contiguous(), like)
    assert torch.equal(moved, like) and moved.stride() == like.stride()
    images = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    moved = with_strides_of(images.contiguous(), images)
    assert torch.equal(moved, images) and moved.stride() == images.stride()
    assert with_strides_of(X, X.clone()) is X
    assert with_strides_of(3, X) == 3 and with_strides_of(X, None) is X
    wide = X.expand(2, 4, 6)
    dense = wide.contiguous()
    assert with_strides_of(dense, wide) is dense, "several places are one element of it"
