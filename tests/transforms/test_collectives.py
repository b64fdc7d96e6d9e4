"""Collectives by axis name: each, under every transform, against the same computation on whole arrays in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P

G = torch.Generator().manual_seed(11)
WORLDS = {"2": ((2,), ("a",)), "3": ((3,), ("a",)), "2 x 4": ((2, 4), ("a", "b"))}


def close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def example(n: int) -> Tensor:
    """(2n, 3n): both dims can be cut in n pieces."""
    return torch.randn(2 * n, 3 * n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


def rows(x: Tensor, n: int) -> Tensor:
    """The number of the rank that has each row, as a column."""
    return torch.arange(n, dtype=x.dtype).repeat_interleave(x.shape[0] // n)[:, None]


# name: (per-rank code of (x, axes), how the result is cut, the same of the whole x and n ranks)
Case = tuple[Callable[[Tensor, Any], Tensor], P, Callable[[Tensor, int], Tensor]]
CASES: dict[str, Case] = {
    "psum": (lambda x, a: x * sf.psum(x.sin().sum(0), a), P("a"), lambda x, n: x * x.sin().sum(0)),
    "pmean": (lambda x, a: x.sin() - sf.pmean(x.mean(0), a), P("a"), lambda x, n: x.sin() - x.mean(0)),
    "pmax": (lambda x, a: x * sf.pmax(x.amax(0), a), P("a"), lambda x, n: x * x.amax(0)),
    "pmin": (lambda x, a: x * sf.pmin(x, a).sum(), P("a"), lambda x, n: x * x.unflatten(0, (n, -1)).amin(0).sum()),
    "all_gather tiled": (lambda x, a: x @ sf.all_gather(x, a, tiled=True).T.sin(), P("a"), lambda x, n: x @ x.T.sin()),
    "all_gather dim 1": (
        lambda x, a: sf.all_gather(x.sin(), a, axis=1, tiled=True),
        P(),
        lambda x, n: torch.cat(x.sin().chunk(n), 1),
    ),
    "all_gather stacked": (
        lambda x, a: x * sf.all_gather(x, a, axis=-1).sin().sum((0, 2)),
        P("a"),
        lambda x, n: x * torch.stack(x.chunk(n), -1).sin().sum((0, 2)),
    ),
    "psum_scatter tiled": (
        lambda x, a: sf.psum_scatter(x.sin(), a, scatter_dimension=1, tiled=True) ** 2,
        P(None, "a"),
        lambda x, n: x.sin().unflatten(0, (n, -1)).sum(0) ** 2,
    ),
    "psum_scatter": (
        lambda x, a: sf.psum_scatter(x.sin().unflatten(1, (-1, 3)), a, scatter_dimension=1) ** 2,
        P(None, "a"),
        lambda x, n: x.sin().unflatten(0, (n, -1)).sum(0) ** 2,
    ),
    "all_to_all tiled": (lambda x, a: sf.all_to_all(x, a, 1, 0, tiled=True).sin(), P(None, "a"), lambda x, n: x.sin()),
    "all_to_all one dim": (
        lambda x, a: sf.all_to_all(x.T, a, 0, 0, tiled=True).sin(),
        P("a"),
        lambda x, n: torch.cat([torch.cat([p.T.chunk(n)[r] for p in x.chunk(n)]) for r in range(n)]).sin(),
    ),
    "all_to_all": (
        lambda x, a: sf.all_to_all(x.unflatten(1, (-1, 3)), a, 1, 0).flatten(0, 1).sin(),
        P(None, "a"),
        lambda x, n: x.sin(),
    ),
    "ppermute": (lambda x, a: x * sf.ppermute(x, a, ring(sf.axis_size(a))), P("a"), lambda x, n: x * x.roll(2, 0)),
    "ppermute of some": (
        lambda x, a: x.sin() + sf.ppermute(x.sin(), a, [(0, 1)]),
        P("a"),
        lambda x, n: x.sin() + torch.where(rows(x, n) == 1, x.sin().roll(2, 0), 0),
    ),
    "axis_index": (lambda x, a: x * (1 + sf.axis_index(a)) ** x, P("a"), lambda x, n: x * (1 + rows(x, n)) ** x),
}


def ring(n: int) -> list[tuple[int, int]]:
    return [(k, (k + 1) % n) for k in range(n)]


def squares(f: Any) -> Any:
    return lambda x: f(x).square().sum()


def tangent(x: Tensor) -> Tensor:
    return x.cos() + 1


TRANSFORMS: dict[str, tuple[Any, Any]] = {
    "value": (lambda f: f, lambda f: f),
    "grad": (lambda f: sf.grad(squares(f)), lambda f: torch.func.grad(squares(f))),
    "jvp": (lambda f: lambda x: sf.jvp(f, (x,), (tangent(x),))[1], lambda f: lambda x: torch.func.jvp(f, (x,), (tangent(x),))[1]),
    "vjp": (
        lambda f: lambda x: sf.vjp(f, x)[1](f(x).cos())[0],
        lambda f: lambda x: torch.func.vjp(f, x)[1](f(x).cos())[0],
    ),
    "vmap": (
        lambda f: lambda x: sf.vmap(f, 2, 1)(torch.stack([x, x.sin()], 2)),
        lambda f: lambda x: torch.func.vmap(f, 2, 1)(torch.stack([x, x.sin()], 2)),
    ),
    "jacrev": (sf.jacrev, torch.func.jacrev),
    "jacfwd": (sf.jacfwd, torch.func.jacfwd),
    "hessian": (lambda f: sf.hessian(squares(f)), lambda f: torch.func.hessian(squares(f))),
    "grad of jvp": (
        lambda f: sf.grad(lambda x: sf.jvp(f, (x,), (tangent(x),))[1].square().sum()),
        lambda f: torch.func.grad(lambda x: torch.func.jvp(f, (x,), (tangent(x),))[1].square().sum()),
    ),
    "vmap of grad": (
        lambda f: lambda x: sf.vmap(sf.grad(squares(f)))(torch.stack([x, x.sin()])),
        lambda f: lambda x: torch.func.vmap(torch.func.grad(squares(f)))(torch.stack([x, x.sin()])),
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("case", CASES)
def test_a_collective_under_a_transform_equals_whole_arrays(case: str, transform: str) -> None:
    body, out, whole = CASES[case]
    ours, theirs = TRANSFORMS[transform]
    with sf.fake_world(3):
        mesh, x = sf.make_mesh((3,), ("a",)), example(3)
        fn = ours(sf.shard_map(lambda x: body(x, "a"), mesh, P("a"), out))
        got = sf.full(sf.shard(lambda x: fn(x), mesh, backend="aten")(x))
        close(got, theirs(lambda x: whole(x, 3))(x))
