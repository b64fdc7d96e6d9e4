"""Functions with derivatives of their own, at each level of torch.func: no trace is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.capture.control_flow.custom_derivatives import (
    Forward,
    Reverse,
    forward_ruled,
    reverse_ruled,
    ruled,
)
from tests.support.stages.bodies import body

X = torch.tensor([0.5, 2.0], dtype=torch.float64)
Y = torch.tensor([3.0, 5.0], dtype=torch.float64)
K = torch.tensor(7.0, dtype=torch.float64)
# the rules double the gradient of x and return ten times that of y, which tells whose it is
REVERSE = Reverse(
    name="f",
    fn=lambda x, y, k: [x * y + k, x * 0 + k],
    count=2,
    results=2,
    forward=lambda x, y, k: [x * y + k, x * 0 + k, x, y],
    back=lambda x, y, g, _, k: [2 * g * y, 10 * g * x],
    given=(True, True),
)
FORWARD = Forward(
    name="f",
    fn=lambda x, y, k: [x * y + k],
    count=2,
    results=1,
    push=lambda x, y, dx, dy, k: [x * y + k, 2 * dx * y + 10 * dy * x],
)


def of(rule: Any) -> Any:
    return lambda x, y: ruled(rule, [x, y, K])[0]


@pytest.mark.parametrize("rule", [REVERSE, FORWARD], ids=["reverse", "forward"])
class TestBoth:
    def test_without_a_derivative_the_function_runs(self, rule: Any) -> None:
        assert torch.equal(of(rule)(X, Y), X * Y + K)

    def test_the_rule_is_the_gradient(self, rule: Any) -> None:
        loss = lambda x, y: of(rule)(x, y).sum()
        gx, gy = torch.func.grad(loss, argnums=(0, 1))(X, Y)
        assert torch.equal(gx, 2 * Y) and torch.equal(gy, 10 * X)

    def test_torchs_own_autograd_takes_it_too(self, rule: Any) -> None:
        x = X.clone().requires_grad_()
        of(rule)(x, Y).sum().backward()
        assert x.grad is not None and torch.equal(x.grad, 2 * Y)

    def test_outer_derivatives_differentiate_the_rule(self, rule: Any) -> None:
        inner = torch.func.grad(lambda x, y: of(rule)(x, y).sum())
        mixed = torch.func.jacrev(inner, argnums=1)(X, Y)
        assert torch.equal(mixed, torch.diag(torch.tensor([2.0, 2.0]).double()))

    def test_samples_have_their_own_gradients(self, rule: Any) -> None:
        xs = torch.stack([X, X + 1, X * 3], 1)  # (2, samples)
        grad = torch.func.grad(lambda x, y: of(rule)(x, y).sum(), argnums=(0, 1))
        gx, gy = torch.func.vmap(grad, (1, None))(xs, Y)
        assert torch.equal(gx, 2 * Y.expand(3, 2))
        assert torch.equal(gy, 10 * xs.T)

    def test_a_gradient_of_what_all_samples_share_is_their_sum(self, rule: Any) -> None:
        xs = torch.stack([X, X + 1, X * 3])
        mapped = torch.func.vmap(of(rule), (0, None))
        gy = torch.func.grad(lambda y: mapped(xs, y).sum())(Y)
        torch.testing.assert_close(gy, 10 * xs.sum(0))

    def test_a_closed_over_value_that_moves_is_refused(self, rule: Any) -> None:
        run = lambda k: ruled(rule, [X, Y, k])[0].sum()
        with pytest.raises(sf.CaptureError) as caught:
            torch.func.grad(run)(K)
        assert "f: it closes over a value that is differentiated" in str(caught.value)


def test_tangents_are_those_of_the_rule() -> None:
    value, dot = torch.func.jvp(of(FORWARD), (X, Y), (Y, X))
    assert torch.equal(value, X * Y + K)
    assert torch.equal(dot, 2 * Y * Y + 10 * X * X)
    still = torch.func.jvp(lambda x: of(FORWARD)(X, Y) + 0 * x, (X,), (X,))[1]
    assert torch.equal(still, X * 0)


def test_forward_mode_needs_a_rule_for_it() -> None:
    with pytest.raises(sf.CaptureError) as caught:
        torch.func.jvp(of(REVERSE), (X, Y), (Y, X))
    text = str(caught.value)
    assert "it has a rule for reverse mode only" in text and "custom_jvp" in text


def test_an_argument_without_a_cotangent_has_a_gradient_of_zero() -> None:
    n = torch.tensor([2, 3])
    rule = Reverse(
        "f",
        lambda x, n: [x * n],
        2,
        1,
        lambda x, n: [x * n, n],
        lambda n, g: [5 * g * n],
        (True, False),
    )
    loss = lambda x: ruled(rule, [x, n])[0].sum()
    assert torch.func.grad(loss)(X).tolist() == [10.0, 15.0]


def test_bodies_and_their_closed_over_values_become_a_rule() -> None:
    k, back = K + 1, K + 2
    outs = body(lambda x, k: [x * k], 1, 1, [k])
    forward = body(lambda x: [x * k, x], 1, 2)
    pull = body(lambda x, g, c: [g * c], 2, 1, [back])
    loss = lambda x: reverse_ruled("f", outs, forward, pull, [x], [True])[0].sum()
    assert torch.func.grad(loss)(X).tolist() == [9.0, 9.0]
    assert float(loss(X)) == 20.0
    push = body(lambda x, dx, c: [x * k, dx * c], 2, 2, [back])
    run = lambda x: forward_ruled("f", outs, push, [x])[0]
    assert torch.func.jvp(run, (X,), (X,))[1].tolist() == [4.5, 18.0]
