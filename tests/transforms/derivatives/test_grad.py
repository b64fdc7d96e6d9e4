"""grad and value_and_grad over trees, and losses without a gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf

W = torch.tensor([1.0, 2.0], dtype=torch.float64)


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (p["w"] ** 2 * x).sum() + p["k"]


def test_gradients_have_the_tree_of_their_argument_and_none_for_constants() -> None:
    value, grads = sf.value_and_grad(loss)({"w": W, "k": torch.tensor(3.0)}, W)
    assert float(value) == 12.0
    assert torch.equal(grads["w"], 2 * W * W) and float(grads["k"]) == 1.0


def test_argnums_choose_and_order_the_gradients() -> None:
    fn = lambda a, b: (a * b).sum()
    a, b = W, 3 * W
    first, second = sf.grad(fn, argnums=(1, 0))(a, b)
    assert torch.equal(first, a) and torch.equal(second, b)
    assert torch.equal(sf.grad(fn, argnums=-1)(a, b), a)


def test_auxiliary_data_stand_beside_the_value_or_the_gradients() -> None:
    fn = lambda w: ((w * w).sum(), {"n": 3, "w": w})
    grads, aux = sf.grad(fn, has_aux=True)(W)
    (value, again), same = sf.value_and_grad(fn, has_aux=True)(W)
    assert torch.equal(grads, 2 * W) and torch.equal(same, grads)
    assert aux["n"] == again["n"] == 3 and float(value) == 5.0


LOSSES = [
    (lambda w: w * 2, "its value is of shape (2,)"),
    (lambda w: 3.0, "its value is a float"),
    (lambda w: w.sum().long(), "its value is of torch.int64"),
]


@pytest.mark.parametrize(("fn", "text"), LOSSES, ids=range(len(LOSSES)))
def test_a_loss_that_is_no_floating_scalar_is_refused(fn: Any, text: str) -> None:
    with pytest.raises(sf.CaptureError) as caught:
        sf.grad(fn)(W)
    assert f"the gradient of <lambda>: {text}" in str(caught.value)
