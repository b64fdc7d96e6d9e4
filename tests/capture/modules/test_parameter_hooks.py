"""Hooks on parameters: called with the gradient, under every transform."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from shardfn.capture.modules.parameter_hooks import hooked, hooks_of

X = torch.tensor([1.0, 2.0])


def test_hooks_see_the_gradient_in_order_and_may_replace_it() -> None:
    seen: list[torch.Tensor] = []
    hooks = [lambda g: 2 * g, seen.append]
    grad = torch.func.grad(lambda x: hooked(x, hooks, {}).square().sum())(X)
    assert grad.tolist() == [4.0, 8.0]
    assert len(seen) == 1


def test_calls_with_one_value_share_a_gradient() -> None:
    known: dict = {}
    times: list[int] = []

    def loss(x: torch.Tensor) -> torch.Tensor:
        hook = loss.hook
        a, b = hooked(x, [hook], known), hooked(x, [hook], known)
        assert a is b
        return (a * b).sum()

    loss.hook = lambda g: times.append(1)
    assert torch.func.grad(loss)(X).tolist() == [2.0, 4.0] and times == [1]


def test_a_hook_sees_one_sample_under_vmap() -> None:
    shapes: list[tuple[int, ...]] = []

    def hook(g: torch.Tensor) -> None:
        shapes.append(tuple(g.shape))

    batch = torch.ones(3, 2)
    each = torch.func.vmap(torch.func.grad(lambda x: hooked(x, [hook], {}).sum()))
    assert torch.equal(each(batch), batch) and shapes == [(2,)]


def test_a_hook_that_returns_another_shape_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="a hook on a parameter returned"):
        torch.func.grad(lambda x: hooked(x, [lambda g: g.sum()], {}).sum())(X)


def test_hooks_that_cannot_fire_are_refused() -> None:
    p = torch.nn.Parameter(X.clone())
    p.register_hook(lambda g: g)
    assert len(hooks_of("f", "w", p)) == 1 and hooks_of("f", "w", X) == ()
    p.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(sf.CaptureError) as caught:
        hooks_of("f", "w", p)
    assert str(caught.value).startswith("f, parameter w: it has a post-accumulate-grad hook")
