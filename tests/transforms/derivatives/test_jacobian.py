"""jacrev, jacfwd and hessian over trees, next to torch.func."""

from __future__ import annotations

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
