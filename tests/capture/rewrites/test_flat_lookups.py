"""Matrices that are looked up by numbers of several dims are looked up by a flat list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardfn as sf

torch.manual_seed(0)
T, K, E, D, F = 5, 2, 3, 4, 6
X = torch.randn(T, D, dtype=torch.float64)
W = torch.randn(E, D, F, dtype=torch.float64)
B = torch.randn(E, F, dtype=torch.float64)
IDS = torch.arange(T * K).view(T, K) % E
Net = Callable[..., Any]

FLAT: dict[str, Net] = {
    "a product": lambda x, w, b, ids: (x[:, None, None] @ w[ids]).sum(1),
    "its transpose": lambda x, w, b, ids: w[ids].mT @ x[:, None, :, None],
    "two products": lambda x, w, b, ids: torch.tanh(x[:, None, None] @ w[ids]) @ w[ids].mT,
    "a bias": lambda x, w, b, ids: torch.relu(x[:, None, None] @ w[ids] + b[ids][:, :, None]),
    "a gate": lambda x, w, b, ids: (
        torch.nn.functional.silu(x[:, None, None] @ w[ids]) * ((x + 1)[:, None, None] @ w[ids])
    ),
    "three dims": lambda x, w, b, ids: x[:, None, None, None] @ w[ids.unsqueeze(1)],
    "vmap": lambda x, w, b, ids: sf.vmap(
        lambda x, ids: torch.relu(x.expand(K, 1, D) @ w[ids])[:, 0] + b[ids]
    )(x, ids),
}
AS_THEY_ARE: dict[str, Net] = {
    "rows of a matrix": lambda x, w, b, ids: b[ids].tanh(),
    "a sum of matrices": lambda x, w, b, ids: x[:, None] @ w[ids].sum(1),
    "an einsum over both": lambda x, w, b, ids: torch.einsum("td,tkdf->tf", x, w[ids]),
    "a flat list": lambda x, w, b, ids: x[:, None] @ w[ids[:, 0]],
    "two lists": lambda x, w, b, ids: w[ids, ids.clamp(max=1)] * x.sum(),
}


def lookups(net: Net) -> set[int]:
    """The dims of the numbers of lookups; the value and the gradients are those of torch."""
    loss = lambda x, w, b, ids: net(x, w, b, ids).sin().sum()
    leaves = [t.clone().requires_grad_() for t in (X, W, B)]
    x, w, b = leaves
    value = loss(x, w, b, IDS)
    wanted = torch.autograd.grad(value, leaves, materialize_grads=True)
    step: Any = sf.value_and_grad(loss, argnums=(0, 1, 2))
    torch.testing.assert_close(step(X, W, B, IDS), (value, wanted), rtol=0, atol=1e-12)
    nodes = sf.jit(step).trace(X, W, B, IDS).program.graph.graph.nodes
    targets = torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default
    return {node.args[1][0].meta["val"].dim() for node in nodes if node.target in targets}


@pytest.mark.parametrize("name", FLAT)
def test_products_read_matrices_by_a_flat_list(name: str) -> None:
    assert lookups(FLAT[name]) == {1}


@pytest.mark.parametrize("name", AS_THEY_ARE)
def test_other_lookups_stay(name: str) -> None:
    assert lookups(AS_THEY_ARE[name]) == ({1} if name == "a flat list" else {2})
