"""Gradients in float16 without a scaled loss are refused; all else is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from message import without_line

import shardfn as sf

W, X = torch.ones(3), torch.ones(2, 3)
SCALER = sf.loss_scale(8.0)


def in_dtype(dtype: torch.dtype) -> Any:
    return sf.mixed_precision(lambda w, x: (x * w).float().sum(), compute=dtype)


LOW = in_dtype(torch.float16)


def in_a_loop(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return sf.scan(lambda c, row: (c + LOW(w, row), None), x.sum() * 0, x)[0]


UNSCALED = {
    "grad": lambda: sf.grad(LOW)(W, X),
    "bucketed_grad": lambda: sf.bucketed_grad(LOW)(W, X),
    "in a loop": lambda: sf.grad(in_a_loop)(W, X),
    "vjp": lambda: sf.jit(lambda w: sf.vjp(LOW, w, X)[1](torch.ones(())))(W),
}


@pytest.mark.parametrize("case", UNSCALED)
def test_gradients_of_a_loss_that_is_not_scaled_are_refused(case: str) -> None:
    with pytest.raises(sf.CaptureError) as error:
        UNSCALED[case]()
    assert (
        without_line(error.value)
        .split("\n")[0]
        .endswith("float16 gradients of an unscaled loss: small gradients become 0")
    )
    assert "sf.loss_scale()" in (error.value.fix or "")


def test_what_is_not_refused() -> None:
    state = SCALER.init()
    scaled = sf.grad(lambda w, x: SCALER.scale(in_a_loop(w, x), state))(W, X)
    assert torch.equal(SCALER.unscale(scaled, state)[0], torch.full((3,), 2.0))
    assert torch.equal(sf.grad(in_dtype(torch.bfloat16))(W, X), torch.full((3,), 2.0))
    assert sf.jit(LOW, backend="aten")(W, X) == 6
    assert sf.jvp(LOW, (W, X), (W, X * 0))[1] == 6
    w = W.clone().requires_grad_()
    with sf.fake_world(1):
        loss = sf.jit(LOW, backend="aten")(w, X)
        (SCALER.scale(loss, state)).backward()  # scaled outside
    assert torch.equal(w.grad, torch.full((3,), 16.0))
