"""A gradient inside per-rank code of a tensor that a collective has written over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfn as sf
from shardfn import P

X = torch.arange(12, dtype=torch.float64).reshape(4, 3) / 7
W = torch.full((3,), 0.3, dtype=torch.float64)


def flat(y: Tensor) -> Tensor:
    z = y.clone()
    dist.all_reduce(z.view(-1))
    return z


def seen_twice(y: Tensor) -> Tensor:
    shown = y.view(-1)
    dist.all_reduce(y)
    return y + 0 * shown.sum()


def copied(y: Tensor) -> Tensor:
    z = torch.empty_like(y)
    z.copy_(sf.psum(y, "a"))
    return z


def itself(y: Tensor) -> Tensor:
    dist.all_reduce(y)
    return y


def row(y: Tensor) -> Tensor:
    z = y.clone()
    dist.all_reduce(z[0])
    return z


def changed_after(y: Tensor) -> Tensor:
    z = flat(y)
    z.mul_(y)
    return z


def gradient(change: Any) -> Tensor:
    def body(w: Tensor, x: Tensor) -> Any:
        loss = lambda w: change((x * w).sin()).square().sum()
        return sf.grad(loss)(w)

    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("a",))
        ours = sf.shard_map(body, mesh, (P(), P("a")), P())
        placed = sf.shard(ours, mesh, (P(), P("a")), backend="aten")
        return sf.full(placed(W, X))


@pytest.mark.parametrize("change", [flat, seen_twice, copied])
def test_it_is_refused_where_it_would_count_for_each_rank(change: Any) -> None:
    with pytest.raises(sf.CaptureError) as error:
        gradient(change)
    said = str(error.value)
    assert said.startswith("shard_map: a value that is equal on all ranks overwrites")
    assert "test_overwritten_tensors.py:" in said and "try: y = sf.psum(y, axis)" in said


def test_parts_and_tensors_themselves_have_the_gradients_of_one_device() -> None:
    def whole(w: Tensor) -> Tensor:
        return ((X[:2] * w).sin() + (X[2:] * w).sin()).square().sum()

    def parts(w: Tensor) -> Tensor:
        a, b = (X[:2] * w).sin(), (X[2:] * w).sin()
        first = a[0] + b[0]
        rows = torch.stack([first, a[1], first, b[1]])
        return rows.square().sum()

    def products(w: Tensor) -> Tensor:
        a, b = (X[:2] * w).sin(), (X[2:] * w).sin()
        return ((a + b) * torch.stack([a, b])).square().sum()

    for change, loss in ((itself, whole), (row, parts), (changed_after, products)):
        wanted = torch.func.grad(loss)(W)
        torch.testing.assert_close(gradient(change), wanted)


def test_a_write_after_the_gradient_does_not_count() -> None:
    def body(w: Tensor, x: Tensor) -> Any:
        def loss(w: Tensor) -> Any:
            y = (x * w).sin()
            return y.square().sum(), y

        found, y = sf.grad(loss, has_aux=True)(w)
        y = y.detach()
        dist.all_reduce(y.view(-1))
        return found

    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("a",))
        ours = sf.shard_map(body, mesh, (P(), P("a")), P())
        found = sf.full(sf.shard(ours, mesh, (P(), P("a")), backend="aten")(W, X))
    wanted = torch.func.grad(lambda w: (X * w).sin().square().sum())(W)
    torch.testing.assert_close(found, wanted)
