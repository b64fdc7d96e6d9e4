"""DTensors that a function closes over: each is read once, wherever it is read first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardfn as sf

W = torch.arange(9.0, dtype=torch.float64).view(3, 3).sin()
X = torch.arange(15.0, dtype=torch.float64).view(5, 3).cos()
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture
def mesh() -> Iterator[Any]:
    with sf.fake_world(2):
        yield sf.make_mesh((2,), ("dp",))


def in_both_branches(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    sin = lambda x: (x @ w).sin()
    cos = lambda x: (x @ w).cos()
    nested = lambda x: torch.cond(x.min() > 0, sin, cos, (x,))
    y: Any = torch.cond(x.sum() > 0, sin, nested, (x,))
    return (y @ w).sum()


def in_two_checkpoints(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    again = torch.utils.checkpoint.checkpoint
    y: Any = again(lambda x: (x @ w).sin(), x, use_reentrant=False)
    z: Any = again(lambda x: (x @ w).cos(), x, use_reentrant=False)
    return (y * z).sum()


def under_no_grad_first(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = w.sum()
    return (x @ w * scale).sum()


def in_a_transform_first(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    rows = torch.vmap(lambda row: (row @ w).sin())(x)
    return (rows * (x @ w)).sum()


LOSSES = in_both_branches, in_two_checkpoints, under_no_grad_first, in_a_transform_first


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_of_one_that_bodies_read(mesh: Any, loss: Loss) -> None:
    w = distribute_tensor(W, mesh, [Shard(0)])
    x = distribute_tensor(X, mesh, [Shard(0)])
    leaves = [W.clone().requires_grad_(), X.clone().requires_grad_()]
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    of_x = sf.jit(sf.grad(lambda x: loss(w, x)), backend="aten")(x)
    torch.testing.assert_close(of_x.full_tensor(), wanted[1])

    held: Any = w.clone().requires_grad_()
    sf.shard(lambda x: loss(held, x), mesh, backend="aten")(x).backward()
    assert isinstance(held.grad, DTensor)
    torch.testing.assert_close(held.grad.full_tensor(), wanted[0])


def test_loops_and_branches_in_loops_read_one(mesh: Any) -> None:
    w = distribute_tensor(W, mesh, [Shard(1)])
    x = distribute_tensor(X, mesh, [Shard(0)])

    def fn(w: torch.Tensor, x: torch.Tensor) -> Any:
        below = lambda k, x: (k < 3) & ((x @ w).sum() < 1e9)
        turn = lambda k, x: (k + 1, (x @ w).sin())
        pick = lambda row: sf.cond(row.sum() > 0, lambda r: r @ w, lambda r: -(r @ w), row)
        _, rows = sf.scan(lambda c, row: (c, pick(row)), x.sum(), x)
        start = (torch.zeros((), dtype=torch.int64), x)
        return sf.while_loop(lambda c: below(*c), lambda c: turn(*c), start)[1], rows

    wanted = sf.jit(lambda x: fn(W, x), backend="aten")(X)  # on one device
    for call in (
        sf.jit(lambda x: fn(w, x), backend="aten"),
        sf.shard(lambda x: fn(w, x), mesh, backend="aten"),
    ):
        got = call(x)
        torch.testing.assert_close([y.full_tensor() for y in got], list(wanted))
