"""A call that autograd records, of a function with an op of which torch has no derivative, has its
values: only its backward is refused. Gradients of attention are such, whose own op has no second
derivative.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import shardfn as sf
from shardfn import P
from shardfn.errors import CaptureError

G = torch.Generator().manual_seed(0)
X = torch.randn(3, 5, 8, dtype=torch.float64, generator=G)
W = torch.randn(8, 8, dtype=torch.float64, generator=G)
REFUSED = re.escape(
    "the function differentiates _scaled_dot_product_flash_attention_for_cpu_backward, of which "
    "torch has no derivative"
)


def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    q = (x @ w).unflatten(2, (2, 4)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True).square().sum()


WANT = torch.func.grad(loss)(W, X)


def of_argument(backend: str | None) -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
    w = W.clone().requires_grad_()
    fn = sf.grad(loss) if backend is None else sf.jit(sf.grad(loss), backend=backend)
    return lambda: fn(w, X), w


def of_closed_over(backend: str) -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
    w = W.clone().requires_grad_()
    fn = sf.jit(lambda x: sf.grad(loss)(w, x), backend=backend)
    return lambda: fn(X), w


CALLS: dict[str, Callable[[], tuple[Callable[[], torch.Tensor], torch.Tensor]]] = {
    "alone": lambda: of_argument(None),
    "op by op": lambda: of_argument("aten"),
    "compiled": lambda: of_argument("inductor"),
    "closed over": lambda: of_closed_over("aten"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_has_its_values_and_its_backward_is_refused(name: str) -> None:
    call, w = CALLS[name]()
    for _ in range(2):
        got = call()
        assert_close(got, WANT)
        assert got.requires_grad
        with pytest.raises(CaptureError, match=REFUSED):
            got.sum().backward()
        assert w.grad is None
    with torch.no_grad():
        assert not call().requires_grad


def test_on_a_mesh() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        fn = sf.shard(sf.grad(loss), mesh, (P(), P("dp")), backend="aten")
        got = fn(W.clone().requires_grad_(), X)
        assert_close(sf.full(got), WANT)
        with pytest.raises(CaptureError, match=REFUSED):
            got.sum().backward()


def test_results_without_derivatives_are_as_they_are() -> None:
    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        gradient, aux = sf.grad(lambda w: (loss(w, x), (x.argmax(), "text")), has_aux=True)(w)
        return gradient, aux, None

    gradient, (place, text), nothing = sf.jit(step, backend="aten")(W.clone().requires_grad_(), X)
    assert_close(gradient, WANT)
    assert (place, text, nothing) == (X.argmax(), "text", None)
    assert gradient.requires_grad and not place.requires_grad


def test_a_custom_op_without_a_derivative() -> None:
    @torch.library.custom_op("shardfn_tests::squared", mutates_args=())
    def squared(x: torch.Tensor) -> torch.Tensor:
        return x * x

    @squared.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    got = sf.jit(lambda w: squared(w) + 1, backend="aten")(W.clone().requires_grad_())
    assert_close(got.detach(), W * W + 1)
    with pytest.raises(CaptureError, match="a custom op that has no usable derivative"):
        got.sum().backward()


def test_a_loss_of_attention_is_differentiated() -> None:
    w = W.clone().requires_grad_()
    sf.jit(loss, backend="aten")(w, X).backward()
    assert_close(w.grad, WANT)
