"""Derivatives by the options of a step, and batches of options: by differences, for each class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import close
from torch import Tensor

import shardfn as sf

O = torch.optim
F64 = torch.float64
W = torch.tensor([1.0, 2.0], dtype=F64)
CASES: dict[str, tuple[Any, dict[str, Any], str, float]] = {
    "SGD momentum": (O.SGD, {"momentum": 0.5}, "momentum", 0.5),
    "SGD dampening": (O.SGD, {"momentum": 0.5, "dampening": 0.1}, "dampening", 0.2),
    "SGD nesterov": (O.SGD, {"momentum": 0.5, "nesterov": True}, "momentum", 0.5),
    "SGD weight_decay": (O.SGD, {"weight_decay": 0.1}, "weight_decay", 0.1),
    "AdamW weight_decay": (O.AdamW, {"weight_decay": 0.1}, "weight_decay", 0.1),
    "Adam eps": (O.Adam, {}, "eps", 0.1),
    "NAdam lr": (O.NAdam, {}, "lr", 0.05),
    "RMSprop lr": (O.RMSprop, {"momentum": 0.3}, "lr", 0.05),
    "RMSprop alpha": (O.RMSprop, {"centered": True}, "alpha", 0.6),
    "Adagrad lr": (O.Adagrad, {}, "lr", 0.05),
    "Adadelta lr": (O.Adadelta, {}, "lr", 0.5),
    "Adadelta rho": (O.Adadelta, {}, "rho", 0.5),
    "Adamax lr": (O.Adamax, {}, "lr", 0.05),
    "RAdam lr": (O.RAdam, {}, "lr", 0.05),
}


def loss_of(name: str) -> Callable[[Tensor], Tensor]:
    cls, options, option, _ = CASES[name]
    opt = sf.optim(cls, **({"lr": 0.05} | options))

    def loss(x: Tensor, w: Tensor = W) -> Tensor:
        params: Any = {"w": w, "s": w[0]}
        state = opt.init(params)
        for _ in range(3):
            grads = {"w": params["w"].sin() * 2, "s": params["s"] * 2}
            params, state = opt.update(params, grads, state, **{option: x})
        return (params["w"] ** 2).sum() + params["s"] ** 3

    return loss


@pytest.mark.parametrize("name", CASES)
def test_derivatives_and_batches(name: str) -> None:
    loss = loss_of(name)
    x, e = torch.tensor(CASES[name][3], dtype=F64), 1e-5
    wanted = (loss(x + e) - loss(x - e)) / (2 * e)
    for found in (sf.grad(loss)(x), sf.jvp(loss, (x,), (torch.ones_like(x),))[1]):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)
    second = sf.grad(sf.grad(loss))(x)
    slope = (sf.grad(loss)(x + e) - sf.grad(loss)(x - e)) / (2 * e)
    torch.testing.assert_close(second, slope, rtol=1e-5, atol=1e-7)
    xs = torch.stack([x, x * 1.5])
    close(sf.vmap(loss)(xs), torch.stack([loss(x) for x in xs]))
    close(sf.vmap(sf.grad(loss))(xs), torch.stack([sf.grad(loss)(x) for x in xs]))
    leaf = x.clone().requires_grad_()
    sf.jit(loss, backend="aten")(leaf).backward()
    close(leaf.grad, sf.grad(loss)(x))


def test_the_first_steps_of_radam_have_a_derivative_by_the_parameters() -> None:
    loss, lr = loss_of("RAdam lr"), torch.tensor(0.05, dtype=F64)
    found, e = sf.grad(lambda w: loss(lr, w))(W), 1e-5
    eye = torch.eye(2, dtype=F64) * e
    wanted = torch.stack([(loss(lr, W + v) - loss(lr, W - v)) / (2 * e) for v in eye])
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)
