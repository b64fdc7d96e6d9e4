"""jacrev, jacfwd and hessian over trees, next to torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import close
from torch import Tensor

import shardfn as sf

G = torch.Generator().manual_seed(5)
X, Y = (torch.randn(5, 3, generator=G, dtype=torch.float64) for _ in range(2))
TREE = {"w": X}


def of_tree(p: dict[str, Tensor], y: Tensor) -> dict[str, Tensor]:
    return {"s": (p["w"] * y).sin().sum(0), "t": (p["w"] @ y.T).mean()}


@pytest.mark.parametrize("name", ["jacrev", "jacfwd"])
@pytest.mark.parametrize("argnums", [0, -1, (0, 1), (1, 0)])
def test_jacobians_over_trees(name: str, argnums: Any) -> None:
    got = getattr(sf, name)(of_tree, argnums=argnums)(TREE, Y)
    close(got, torch.func.jacrev(of_tree, argnums=1 if argnums == -1 else argnums)(TREE, Y))


@pytest.mark.parametrize("argnums", [0, (0, 1)])
def test_hessian_over_trees(argnums: Any) -> None:
    loss = lambda p, y: (p["w"] ** 3 * y).sum()
    close(
        sf.hessian(loss, argnums=argnums)(TREE, Y),
        torch.func.hessian(loss, argnums=argnums)(TREE, Y),
    )


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_every_column_has_the_same_random_numbers(backend: str) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        kept = torch.nn.functional.dropout(x, 0.5)
        return (kept**3 * torch.rand(5, dtype=torch.float64)).sum()

    def drawn(derivative: Callable[..., Any]) -> torch.Tensor:
        sf.random.state.seed(0)
        return sf.jit(derivative, backend=backend)(x)

    x = torch.linspace(1, 2, 5, dtype=torch.float64)
    close(drawn(sf.jacfwd(fn)), drawn(sf.jacrev(fn)))
    second = drawn(sf.jacrev(sf.jacrev(fn)))
    assert second.any()
    for derivative in (sf.hessian(fn), sf.jacfwd(sf.grad(fn)), sf.jacfwd(sf.jacfwd(fn))):
        close(drawn(derivative), second)


def test_samples_may_have_random_numbers_of_their_own() -> None:
    x = torch.ones(4, 6, dtype=torch.float64)
    fn = sf.hessian(lambda x: (torch.rand_like(x) * x**2).sum())
    sf.random.state.seed(0)
    found = sf.jit(sf.vmap(fn, randomness="different"), backend="aten")(x).diagonal(0, 1, 2)
    assert len(found.unique()) == x.numel()
