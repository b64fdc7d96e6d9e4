"""torch.autograd.grad and requires_grad_ inside of a function are the derivative that they mean,
under every transform.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from worlds import simulated

import shardfn as sf
from shardfn import P

Params = dict[str, torch.Tensor]
GENERATOR = torch.Generator().manual_seed(0)
taken = torch.autograd.grad


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


PARAMS = {"a": values(2, 5), "b": values(5), "c": values(5, 1)}
X = values(7, 2)


def net(params: Params, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ params["a"] + params["b"]) @ params["c"]


def physics(params: Params, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    u = net(params, x)
    (first,) = taken(u, x, torch.ones_like(u), create_graph=True)
    (second,) = taken(first[:, 0].sum(), x, create_graph=True)
    return ((first[:, 1] - second[:, 0]) ** 2).mean() + u.sum()


def penalty(params: Params, x: torch.Tensor) -> torch.Tensor:
    between = (0.3 * x + 0.7 * x.flip(0)).requires_grad_(True)
    out = net(params, between)
    ones = torch.ones_like(out)
    options: Any = {"create_graph": True, "retain_graph": True, "only_inputs": True}
    g = taken(outputs=out, inputs=between, grad_outputs=ones, **options)[0]
    return ((g.norm(2, 1) - 1) ** 2).mean()


def of_an_argument(params: Params, x: torch.Tensor) -> torch.Tensor:
    before = x.sin()
    x.requires_grad = True
    g = taken((net(params, x)[:, 0] * before[:, 0]).sum(), x, create_graph=True)[0]
    return (g**3).sum()


def inner_step(params: Params, x: torch.Tensor) -> torch.Tensor:
    params = {k: p if p.requires_grad else p.requires_grad_() for k, p in params.items()}
    loss = (net(params, x) ** 2).mean()
    steps = taken(loss, list(params.values()), create_graph=True)
    moved = {k: p - 0.1 * g for (k, p), g in zip(params.items(), steps, strict=True)}
    return (net(moved, x) ** 2).mean()


def third_order(params: Params, x: torch.Tensor) -> torch.Tensor:
    t = torch.linspace(0, 1, 5, dtype=torch.float64, requires_grad=True)
    u = (torch.sin(t * params["b"]) ** 3).sum()
    for _ in range(3):
        (g,) = taken(u, t, create_graph=True)
        u = (g * params["b"]).sum()
    return u * x.sum()


def without_a_graph(params: Params, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    (g,) = taken(net(params, x).sum(), x, retain_graph=True)
    return (g * x).sum() + net(params, x).sum()


def unused(params: Params, x: torch.Tensor) -> torch.Tensor:
    x, y = x.clone().requires_grad_(), x.cos().requires_grad_()
    g, none = taken(net(params, x).sum(), (x, y), create_graph=True, allow_unused=True)
    zeros = taken(net(params, x).sum(), [y], materialize_grads=True, create_graph=True)[0]
    assert none is None
    return (g**2).sum() + zeros.sum()


def in_a_loop(params: Params, x: torch.Tensor) -> torch.Tensor:
    def body(carry: torch.Tensor, _: None) -> tuple[torch.Tensor, None]:
        y = carry.clone().requires_grad_()
        (g,) = taken(net(params, y).sum(), y, create_graph=True)
        return carry - 0.1 * g, None

    return sf.scan(body, x, None, length=3)[0].sum()


LOSSES: list[Callable[[Params, torch.Tensor], torch.Tensor]] = [
    physics,
    penalty,
    of_an_argument,
    inner_step,
    third_order,
    without_a_graph,
    unused,
]


def plain(
    loss: Callable[[Params, torch.Tensor], torch.Tensor], x: torch.Tensor
) -> tuple[torch.Tensor, Params]:
    """The value and the gradients in eager torch."""
    params = {k: p.clone().requires_grad_() for k, p in PARAMS.items()}
    value = loss(params, x.clone())
    found = taken(value, list(params.values()), allow_unused=True)
    pairs = zip(PARAMS.items(), found, strict=True)
    grads = {k: torch.zeros_like(p) if g is None else g for (k, p), g in pairs}
    return value.detach(), grads


def assert_close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(sf.full(got), wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_values_and_gradients_are_eager_torchs(loss: Any) -> None:
    value, grads = plain(loss, X)
    assert_close(sf.jit(loss, backend="aten")(PARAMS, X.clone()), value)
    assert_close(sf.value_and_grad(loss)(PARAMS, X.clone()), (value, grads))
    params = {k: p.clone().requires_grad_() for k, p in PARAMS.items()}
    sf.jit(loss, backend="aten")(params, X.clone()).backward()
    assert_close(
        {k: p.grad for k, p in params.items() if p.grad is not None},
        {k: grads[k] for k, p in params.items() if p.grad is not None},
    )
    with simulated(dp=2, tp=2) as mesh:
        placed = {"a": P(None, "tp"), "b": P("tp"), "c": P("tp")}, P("dp")
        step = sf.shard(sf.value_and_grad(loss), mesh, placed, backend="aten")
        assert_close(step(PARAMS, X.clone()), (value, grads))
        inside = sf.grad(sf.shard(loss, mesh, placed, backend="aten"))
        assert_close(inside(PARAMS, X.clone()), grads)


@pytest.mark.parametrize("loss", [physics, penalty, in_a_loop], ids=lambda f: f.__name__)
def test_under_vmap_and_jvp_they_are_those_of_each_sample(loss: Any) -> None:
    rows = torch.stack([X, X + 1, 2 * X])
    each = [sf.grad(loss)(PARAMS, x) for x in rows]
    stacked = {k: torch.stack([grads[k] for grads in each]) for k in PARAMS}
    assert_close(sf.vmap(sf.grad(loss), in_axes=(None, 0))(PARAMS, rows), stacked)
    total = sf.grad(lambda params: sf.vmap(loss, in_axes=(None, 0))(params, rows).sum())
    assert_close(total(PARAMS), {k: g.sum(0) for k, g in stacked.items()})
    directions = {k: torch.ones_like(p) for k, p in PARAMS.items()}
    _, tangent = sf.jvp(lambda params: loss(params, X), (PARAMS,), (directions,))
    assert_close(tangent, sum(g.sum() for g in sf.grad(loss)(PARAMS, X).values()))


def test_parameters_that_a_function_closes_over_get_their_gradients() -> None:
    module = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()

    def loss(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (g,) = taken(module(x).sum(), x, create_graph=True)
        squares = taken(
            (g**2).sum(), list(module.parameters()), create_graph=True, allow_unused=True
        )
        return sum((s**2).sum() for s in squares if s is not None) + (g**2).sum()

    wanted = taken(loss(X), list(module.parameters()), allow_unused=True)
    sf.jit(loss, backend="aten")(X).backward()
    for p, g in zip(module.parameters(), wanted, strict=True):
        if g is not None:
            assert_close(p.grad, g)


def test_what_torch_refuses_is_refused() -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        sf.jit(lambda x: taken((x.detach() ** 2).sum(), x.requires_grad_()), backend="aten")(X)
    with pytest.raises(sf.CaptureError, match="is_grads_batched"):
        sf.jit(lambda x: taken(x.sum(), x, is_grads_batched=True), backend="aten")(X)


CLOSED_OVER = torch.ones(2, dtype=torch.float64)


def _by_method(x: torch.Tensor) -> torch.Tensor:
    CLOSED_OVER.requires_grad_()
    return x * CLOSED_OVER.detach()


def _by_attribute(x: torch.Tensor) -> torch.Tensor:
    CLOSED_OVER.requires_grad = True
    return x * CLOSED_OVER.detach()


def _in_a_loop(x: torch.Tensor) -> torch.Tensor:
    return sf.scan(lambda c, _: (_by_method(c), None), x, None, length=2)[0]


@pytest.mark.parametrize("fn", [_by_method, _by_attribute, _in_a_loop])
def test_a_closed_over_tensor_does_not_begin_to_require_grad(fn: Any) -> None:
    with pytest.raises(sf.CaptureError, match="the function changes requires_grad of"):
        sf.jit(fn, backend="aten")(torch.ones(2, dtype=torch.float64))
    assert not CLOSED_OVER.requires_grad
