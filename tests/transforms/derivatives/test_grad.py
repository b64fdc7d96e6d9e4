"""grad and value_and_grad over trees, and losses without a gradient."""

from __future__ import annotations

from typing import Any

import torch

import shardfn as sf

W = torch.tensor([1.0, 2.0], dtype=torch.float64)


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (p["w"] ** 2 * x).sum() + p["k"]


def test_gradients_have_the_tree_of_their_argument_and_none_for_constants() -> None:
    params = {"w": W, "k": torch.tensor(3.0), "unused": (W,)}
    value, grads = sf.value_and_grad(loss)(params, W)
    assert float(value) == 12.0
    assert torch.equal(grads["w"], 2 * W * W) and float(grads["k"]) == 1.0
    assert torch.equal(grads["unused"][0], torch.zeros_like(W))


def test_auxiliary_data_stand_beside_the_value_or_the_gradients() -> None:
    fn = lambda w: ((w * w).sum(), {"n": 3, "w": w})
    grads, aux = sf.grad(fn, has_aux=True)(W)
    (value, again), same = sf.value_and_grad(fn, has_aux=True)(W)
    assert torch.equal(grads, 2 * W) and torch.equal(same, grads)
    assert aux["n"] == again["n"] == 3 and float(value) == 5.0
