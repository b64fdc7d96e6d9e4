"""Recurrent modules of torch in float32, whose fused kernels have no derivative that a transform
takes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardfn as sf
from shardfn import P

KINDS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


class Mean(nn.Module):
    """The mean square of what a recurrent module returns."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = KINDS[kind](3, 5, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0].square().mean()


X = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(0))


def _wanted(kind: str) -> Any:
    net = Mean(kind)
    loss = net(X)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in net.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_an_input_that_is_not_differentiated(kind: str) -> None:
    fn, params, buffers = sf.functionalize(Mean(kind))
    step = sf.value_and_grad(lambda p, x: fn(p, buffers, x)[0])
    torch.testing.assert_close(step(params, X), _wanted(kind))
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        found = sf.shard(step, mesh, (P(), P("dp")), backend="aten")(params, X)
        torch.testing.assert_close(sf.full(found), _wanted(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_a_function_closes_over(kind: str) -> None:
    net = Mean(kind).requires_grad_(False)
    found = sf.jit(lambda x: net(x), backend="aten")(X)
    torch.testing.assert_close(found, net(X))
    x = X.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(net(x), x)
    torch.testing.assert_close(sf.grad(lambda x: net(x))(X), wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [{"bidirectional": True}, {"batch_first": True}],
    ids=lambda options: next(iter(options)),
)
def test_its_dropout_is_that_of_one_device(kind: str, options: Any) -> None:
    net = KINDS[kind](3, 4, 2, dropout=0.5, **options).double()
    fn, params, buffers = sf.functionalize(net)
    loss = lambda p, x: fn(p, buffers, x)[0][0].square().sum()
    x = X[:3, :4].double().requires_grad_()
    sf.random.state.seed(3)
    with sf.random.plain():
        value = net(x)[0].square().sum()
    calls = sf.random.state.get()
    *gradients, of_x = torch.autograd.grad(value, [*net.parameters(), x])
    wanted = dict(zip(params, gradients, strict=True))
    assert not torch.allclose(net.eval()(x)[0].square().sum(), value)
    net.train().requires_grad_(False)
    x = x.detach()
    for found, right in (
        (lambda: sf.value_and_grad(loss)(params, x), (value.detach(), wanted)),
        (lambda: sf.jit(loss, backend="aten")(params, x), value.detach()),
        (lambda: sf.grad(lambda x: net(x)[0].square().sum())(x), of_x),
        (
            lambda: sf.jvp(lambda x: net(x)[0].square().sum(), (x,), (x,)),
            (value.detach(), (of_x * x).sum()),
        ),
    ):
        sf.random.state.seed(3)
        torch.testing.assert_close(found(), right)
        assert torch.equal(sf.random.state.get()["default"], calls["default"])
