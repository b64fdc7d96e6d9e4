"""The second half of a call that autograd follows: gradients from cotangents and saved tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P

GENERATOR = torch.Generator().manual_seed(0)
W = torch.randn(2, 3, dtype=torch.float64, generator=GENERATOR)
X = torch.randn(7, 2, dtype=torch.float64, generator=GENERATOR)  # 3, 3, 1 rows
G = torch.randn(7, 3, dtype=torch.float64, generator=GENERATOR)


def fn(w: Any, x: Any) -> Any:
    """Results with and without derivatives, and one that x alone reaches."""
    return (x @ w).tanh(), x.argmax(), w.sin()


def plain(of_first: Any, of_last: Any) -> Any:
    w = W.clone().requires_grad_()
    first, _, last = fn(w, X)
    pairs = [(first, of_first), (last, of_last)]
    pairs = [(y, g) for y, g in pairs if g is not None]
    return torch.autograd.grad([y for y, _ in pairs], [w], [g for _, g in pairs])[0]


def several(a: Any, b: Any, c: Any) -> Any:
    """Results that depend on a, on a and b, on b with a gradient of zeros, and on c alone."""
    return a.sum(), (a * b).sum(), b.floor().sum(), c.sin().sum()


CALLS: dict[str, Any] = {
    "jit": lambda mesh: sf.jit(several, backend="aten"),
    "shard": lambda mesh: sf.shard(several, mesh, backend="aten"),
    "the code of one rank": lambda mesh: sf.jit(
        lambda a, b, c: (*several(a, b, c), a.to_local()), backend="aten"
    ),
    "closed over": lambda mesh: lambda *held: sf.jit(lambda: several(*held), backend="aten")(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("chosen", [(0,), (1,), (2,), (3,), (0, 3), (0, 1, 2)])
def test_a_gradient_of_a_result_that_does_not_depend_on_it_is_none(
    call: str, chosen: tuple[int, ...]
) -> None:
    values = [torch.randn(6, 2, generator=GENERATOR) for _ in range(3)]
    plain = [x.clone().requires_grad_() for x in values]
    torch.autograd.backward([several(*plain)[k] for k in chosen])
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        given = [sf.distribute(x, mesh, P("dp")).requires_grad_() for x in values]
        outs = CALLS[call](mesh)(*given)
        torch.autograd.backward([outs[k] for k in chosen])
        for x, y in zip(given, plain, strict=True):
            assert (x.grad is None) is (y.grad is None)
            assert x.grad is None or sf.full(x.grad).count_nonzero() == (y.grad.count_nonzero())


def test_a_plain_tensor_has_a_plain_gradient() -> None:
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("dp",))
        w = W.clone().requires_grad_()
        x = sf.distribute(X, mesh, P("dp"))
        loss = lambda w, x: (x @ w).tanh().sum()
        step = sf.shard(loss, mesh, (P(), P("dp")), backend="aten")
        (grad,) = torch.autograd.grad(step(w, x), w)
    assert type(grad) is torch.Tensor
    torch.testing.assert_close(grad, plain(torch.ones_like(G), None))
