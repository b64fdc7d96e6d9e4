"""Every transform outside of shard_map and inside of it, on three functions: equal to the same
over whole arrays in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import shardfn as sf
from shardfn import P

Shaped = Callable[[Tensor], Tensor]
WORLDS: dict[str, tuple[tuple[int, ...], Any]] = {
    "2": ((2,), "a"),
    "3": ((3,), "a"),
    "2 x 4": ((2, 4), ("a", "b")),
}

# name: per-rank code of (rows, axes); the same of all rows, a row for each sample of each rank
FUNCTIONS: dict[str, tuple[Callable[[Tensor, Any], Tensor], Shaped]] = {
    "sum": (lambda x, a: x.sin() * sf.psum((x * x).sum(0), a), lambda x: x.sin() * (x * x).sum(0)),
    "gather": (
        lambda x, a: (
            (x @ sf.all_gather(x, a, tiled=True).T).cos() @ sf.all_gather(x.tanh(), a, tiled=True)
        ),
        lambda x: (x @ x.T).cos() @ x.tanh(),
    ),
    "softmax": (lambda x, a: x * softmax(x, a), lambda x: x * x.softmax(0)),
}


def softmax(x: Tensor, a: Any) -> Tensor:
    e = (x - sf.pmax(x.amax(0), a)).exp()
    return e / sf.psum(e.sum(0), a)


OURS: dict[str, Callable[[Shaped], Shaped]] = {
    "grad": lambda f: sf.grad(lambda x: f(x).square().sum()),
    "bucketed_grad": lambda f: lambda x: sf.bucketed_grad(lambda x: f(x).square().sum())(x)[1],
    "jvp": lambda f: lambda x: sf.jvp(f, (x,), (x + 1,))[1],
    "vjp": lambda f: lambda x: sf.vjp(f, x)[1](x + 1)[0],
    "vmap": lambda f: sf.vmap(f, 1, 1),
    "jacrev": lambda f: lambda x: sf.jacrev(f)(x).sum((0, 1)),
    "jacfwd": lambda f: lambda x: sf.jacfwd(f)(x).sum((2, 3)),
}
THEIRS: dict[str, Callable[[Shaped], Shaped]] = {
    "grad": lambda f: torch.func.grad(lambda x: f(x).square().sum()),
    "bucketed_grad": lambda f: torch.func.grad(lambda x: f(x).square().sum()),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x + 1,))[1],
    "vjp": lambda f: lambda x: torch.func.vjp(f, x)[1](x + 1)[0],
    "vmap": lambda f: torch.func.vmap(f, 1, 1),
    "jacrev": lambda f: lambda x: torch.func.jacrev(f)(x).sum((0, 1)),
    "jacfwd": lambda f: lambda x: torch.func.jacfwd(f)(x).sum((2, 3)),
}


def as_rows(name: str, f: Shaped) -> Shaped:
    """A function of rows; under vmap, of two such at once: (rows, samples, columns)."""
    return (
        (lambda x: (f(torch.stack([x, x.cos()], 1)) * torch.tensor([[1], [2]])).sum(1))
        if name == "vmap"
        else f
    )


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("side", ["outside", "inside"])
def test_a_transform_and_shard_map_in_either_order(side: str, name: str, world: str) -> None:
    shape, over = WORLDS[world]
    n = torch.Size(shape).numel()
    x = torch.randn(2 * n, 3, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    names = (over,) if isinstance(over, str) else over
    with sf.fake_world(n):
        mesh = sf.make_mesh(shape, names)
        for body, whole in FUNCTIONS.values():
            local = lambda x, body=body: body(x, over)
            if side == "outside":
                fn = sf.shard(
                    as_rows(name, OURS[name](sf.shard_map(local, mesh, P(over), P(over)))),
                    mesh,
                    backend="aten",
                )
            else:
                fn = sf.shard_map(
                    as_rows(name, OURS[name](local)), mesh, P(over), P(over), backend="aten"
                )
            assert_close(
                sf.full(fn(x)), as_rows(name, THEIRS[name](whole))(x), rtol=1e-11, atol=1e-11
            )


@pytest.mark.parametrize("inner", OURS)
@pytest.mark.parametrize("outer", OURS)
def test_transforms_on_both_sides_of_shard_map(outer: str, inner: str) -> None:
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    body, whole = FUNCTIONS["softmax"]
    with sf.fake_world(2), sf.use_mesh(sf.make_mesh((2,), ("a",))):
        mapped = sf.shard_map(
            as_rows(inner, OURS[inner](lambda x: body(x, "a"))), None, P("a"), P("a")
        )
        fn = sf.shard(as_rows(outer, OURS[outer](mapped)), backend="aten")
        wanted = as_rows(outer, THEIRS[outer](as_rows(inner, THEIRS[inner](whole))))
        assert_close(sf.full(fn(x)), wanted(x), rtol=1e-10, atol=1e-10)
