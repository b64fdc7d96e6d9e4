"""The gradient of a replicated DTensor that meets plain arguments is that of one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardfn as sf
from shardfn.simulated import SimulatedTensor

R, S = Replicate(), Shard(0)
W = torch.arange(8.0, dtype=torch.float64).reshape(4, 2).sin()
X = torch.arange(12.0, dtype=torch.float64).reshape(3, 4).cos()
T = torch.arange(6.0, dtype=torch.float64).reshape(3, 2).sin()  # labels


@pytest.fixture(name="mesh")
def _mesh() -> Iterator[Any]:
    with sf.fake_world(4):
        yield sf.make_mesh((2, 2), ("dp", "tp"))


def loss(mesh: Any, **options: Any) -> Callable[..., Any]:
    """A loss of tensor parallelism on the last axis, of plain labels."""
    part = mesh["tp"]

    def fn(w: Any, x: Any, t: Any) -> Any:
        y = (DTensor.from_local(x, part, [R]) @ w).redistribute(part, [R])
        return (y.to_local(**options) - t).square().sum()

    return fn


def of_one(w: Any, x: Any = X, t: Any = T) -> Any:
    return (x @ w - t).square().sum()


WANTED = torch.func.grad(of_one)(W)


def gradient(fn: Any, w: Any, x: Any = X, t: Any = T) -> torch.Tensor:
    return sf.full(sf.jit(sf.grad(fn), backend="aten")(w, x, t))


def close(got: Any, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def in_a_scan(fn: Any) -> Any:
    step = lambda w: lambda c, row: (c + fn(w, row[0][None], row[1][None]), None)
    return lambda w, x, t: sf.scan(step(w), t.sum() * 0, (x, t))[0]


def in_a_vmap(fn: Any) -> Any:
    row = lambda w: lambda x, t: fn(w, x[None], t[None])
    return lambda w, x, t: sf.vmap(row(w))(x, t).sum()


AROUND: dict[str, Any] = {
    "alone": lambda fn: fn,
    "checkpoint": sf.checkpoint,
    "scan": in_a_scan,
    "vmap": in_a_vmap,
}


@pytest.mark.parametrize("case", AROUND)
def test_labels_that_all_ranks_have_count_once(mesh: Any, case: str) -> None:
    w = distribute_tensor(W, mesh["tp"], [Shard(1)])
    close(gradient(AROUND[case](loss(mesh)), w), WANTED)


def test_a_derivative_of_the_gradient(mesh: Any) -> None:
    w = distribute_tensor(W, mesh["tp"], [Shard(1)])
    fn = loss(mesh)
    norm = lambda *args: sf.grad(fn)(*args).square().sum().full_tensor()
    of_norm = lambda w: torch.func.grad(of_one)(w).square().sum()
    close(gradient(norm, w), torch.func.grad(of_norm)(W))


def test_with_partial_gradients_it_is_the_sum(mesh: Any) -> None:
    w = distribute_tensor(W, mesh["tp"], [Shard(1)])
    close(gradient(loss(mesh, grad_placements=[Partial()]), w), 2 * WANTED)


def test_labels_that_differ_are_refused_and_named(mesh: Any) -> None:
    w = distribute_tensor(W, mesh["tp"], [Shard(1)])
    other = SimulatedTensor([T + rank % 2 for rank in range(4)])
    with pytest.raises(sf.DivergenceError) as caught:
        gradient(loss(mesh), w, X, other)
    error = caught.value
    assert error.arg_path == "t"
    text = str(error)
    assert "argument t: it differs between rank 0 and rank 1" in text
    assert "needed: the same on all ranks of tp" in text
    assert "try: to_local(grad_placements=[Partial()])" in text
    assert error.source is not None and "test_alike.py" in error.source
    value = sf.jit(loss(mesh), backend="aten")(w, X, other)  # no gradient, no check
    close(value.shards[1], of_one(W, X, T + 1))


def test_where_ranks_differ_for_certain_it_is_the_sum(mesh: Any) -> None:
    whole = [R, R]
    x = distribute_tensor(torch.cat([X, X + 1, X, X]), mesh, [S, S])
    t = torch.cat([T] * 4)

    def of_shards(w: Any, x: Any, t: Any) -> Any:
        rows = x.to_local() @ w.to_local() - t[:3]
        return DTensor.from_local(rows, mesh, [S, S]).square().sum().full_tensor()

    def reduced(w: Any, x: Any, t: Any) -> Any:
        y = (w.to_local() * t.sum()).sum()
        dist.all_reduce(y, group=mesh.get_group("dp"))
        return y

    w = distribute_tensor(W, mesh, whole)
    wanted = torch.func.grad(of_one)(W, sf.full(x), t)
    close(gradient(of_shards, w, x, t), wanted)
    total = 2 * T.sum() * torch.ones_like(W)  # over dp a sum, over tp one value
    close(gradient(reduced, w, x, T), total)
