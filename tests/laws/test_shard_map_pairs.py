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
from transform_pairs import SHAPED, Shaped
from worlds import simulated

import shardfn as sf
from shardfn import P

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


def as_rows(name: str, f: Shaped) -> Shaped:
    """A function of rows; under vmap, of two such at once: (rows, samples, columns)."""
    return (
        (lambda x: (f(torch.stack([x, x.cos()], 1)) * torch.tensor([[1], [2]])).sum(1))
        if name == "vmap"
        else f
    )


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", SHAPED)
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
                    as_rows(name, SHAPED[name](sf, sf.shard_map(local, mesh, P(over), P(over)))),
                    mesh,
                    backend="aten",
                )
            else:
                fn = sf.shard_map(
                    as_rows(name, SHAPED[name](sf, local)), mesh, P(over), P(over), backend="aten"
                )
            assert_close(
                sf.full(fn(x)),
                as_rows(name, SHAPED[name](torch.func, whole))(x),
                rtol=1e-11,
                atol=1e-11,
            )


@pytest.mark.parametrize("inner", SHAPED)
@pytest.mark.parametrize("outer", SHAPED)
def test_transforms_on_both_sides_of_shard_map(outer: str, inner: str) -> None:
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    body, whole = FUNCTIONS["softmax"]
    with simulated(a=2) as mesh, sf.use_mesh(mesh):
        mapped = sf.shard_map(
            as_rows(inner, SHAPED[inner](sf, lambda x: body(x, "a"))), None, P("a"), P("a")
        )
        fn = sf.shard(as_rows(outer, SHAPED[outer](sf, mapped)), backend="aten")
        wanted = as_rows(
            outer, SHAPED[outer](torch.func, as_rows(inner, SHAPED[inner](torch.func, whole)))
        )
        assert_close(sf.full(fn(x)), wanted(x), rtol=1e-10, atol=1e-10)
