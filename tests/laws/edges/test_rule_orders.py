"""What a rule that is not the true derivative means at the second order, as JAX defines it.

The innermost derivative takes the rule; the next one differentiates the rule's own code, function
value included, and takes the rule only where that code calls the function. Every number is worked
out by hand, of f(x) = x**3 with 2x for its derivative, at x = 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P

F64 = torch.float64
TWO = torch.tensor(2.0, dtype=F64)


def made(kind: str, again: bool) -> Callable[[Tensor], Tensor]:
    """f with the wrong rule, whose code calls f or not."""
    f = getattr(sf, kind)(lambda x: x**3)
    value = f if again else lambda x: x**3
    if kind == "custom_jvp":
        f.defjvp(lambda xs, ts: (value(*xs), 2 * xs[0] * ts[0]))
    else:
        f.defvjp(lambda x: (value(x), x), lambda x, g: (2 * x * g,))
    return f


def jvp_of_grad(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: sf.jvp(sf.grad(f), (x,), (torch.ones_like(x),))[1]


SECOND: dict[str, Callable[[Any], Any]] = {
    "grad of grad": lambda f: sf.grad(sf.grad(f)),
    "jvp of grad": jvp_of_grad,
    "hessian": sf.hessian,
    "jacfwd of jacrev": lambda f: sf.jacfwd(sf.jacrev(f)),
    "jacfwd of jacfwd": lambda f: sf.jacfwd(sf.jacfwd(f)),
    "jacrev of jacfwd": lambda f: sf.jacrev(sf.jacfwd(f)),
    "grad of jit of grad": lambda f: sf.grad(sf.jit(sf.grad(f), backend="aten")),
    "vmap of hessian": lambda f: lambda x: sf.vmap(sf.hessian(f))(x.expand(2))[1],
}
FORWARD_INSIDE = ("jacfwd of jacfwd", "jacrev of jacfwd")  # where forward mode meets the rule
ONLY_REVERSE = ("grad of grad", "grad of jit of grad")


def expected(again: bool) -> tuple[float, float]:
    """The derivatives of 2x, and of 2 f(x) 2x, where f(x) is x**3 or counts by its rule."""
    slope = 2 * 2.0 if again else 3 * 2.0**2
    return 2.0, 4 * 2.0**3 + 4 * 2.0 * slope


@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize(
    ("kind", "again"),
    [("custom_jvp", False), ("custom_jvp", True), ("custom_vjp", False), ("custom_vjp", True)],
)
def test_second_derivatives_of_a_rule_that_is_not_the_derivative(
    kind: str, again: bool, second: str
) -> None:
    f, take = made(kind, again), SECOND[second]
    if kind == "custom_vjp" and (
        second in FORWARD_INSIDE or (again and second not in ONLY_REVERSE)
    ):
        with pytest.raises(
            sf.CaptureError, match="and is differentiated in forward mode\n  try: use sf.custom_jvp"
        ):
            take(f)(TWO)
        return
    for fn, wanted in zip((f, lambda x: f(x) ** 2), expected(again), strict=True):
        assert_close(take(fn)(TWO), torch.tensor(wanted, dtype=F64))


@pytest.mark.parametrize("kind", ["custom_jvp", "custom_vjp"])
def test_a_derivative_by_something_else_leaves_the_rule_to_the_next_one(kind: str) -> None:
    f = made(kind, again=False)
    inner = lambda x: sf.grad(lambda y: f(x) * y)(torch.ones_like(x))
    assert_close(sf.grad(inner)(TWO), torch.tensor(4.0, dtype=F64))


def test_a_clipped_gradient_has_the_second_derivative_of_what_clips_it() -> None:
    clipped = sf.custom_vjp(lambda x: x)
    clipped.defvjp(lambda x: (x, None), lambda _, g: (g.clamp(-1, 1),))
    half_square = lambda x: (clipped(x) ** 2 / 2).sum()
    x = torch.tensor([0.5, 3.0], dtype=F64)
    assert_close(sf.grad(half_square)(x), torch.tensor([0.5, 1.0], dtype=F64))
    assert_close(sf.hessian(half_square)(x), torch.diag(torch.tensor([1.0, 0.0], dtype=F64)))


def test_a_closed_over_value_of_an_outer_derivative_counts_by_the_code_of_the_rule() -> None:
    def outer(w: Tensor, x: Tensor) -> Tensor:
        scaled = sf.custom_vjp(lambda x: w * x**2)
        scaled.defvjp(lambda x: (w * x**2, x), lambda x, g: (2 * w * x * g,))
        return sf.grad(scaled)(x)

    assert_close(sf.grad(outer)(torch.tensor(3.0, dtype=F64), TWO), torch.tensor(4.0, dtype=F64))


@pytest.mark.parametrize("kind", ["custom_jvp", "custom_vjp"])
def test_under_torch_func_and_under_torch_autograd_the_same_rule_counts(kind: str) -> None:
    f = made(kind, again=False)
    second = torch.func.grad(torch.func.grad(lambda x: f(x) ** 2))
    assert_close(second(TWO), torch.tensor(128.0, dtype=F64))
    x = torch.tensor([2.0, 2.0], dtype=F64, requires_grad=True)
    torch.func.vmap(f)(x).sum().backward()
    assert_close(x.grad, torch.tensor([4.0, 4.0], dtype=F64))


def test_a_hessian_of_a_custom_vjp_on_shards_and_compiled() -> None:
    wave = sf.custom_vjp(torch.sin)
    wave.defvjp(lambda x: (torch.sin(x), x), lambda x, g: (g * torch.cos(x),))
    x = torch.tensor([0.3, 0.7, 1.1], dtype=F64)
    wanted = torch.func.hessian(lambda x: torch.sin(x).square().sum())(x)
    loss = lambda x: wave(x).square().sum()
    with simulated(a=2) as mesh:
        got = sf.shard(sf.hessian(loss), mesh, P("a"), backend="aten")(x)
        assert_close(sf.full(got), wanted)
    assert_close(sf.jit(sf.hessian(loss), backend="inductor")(x), wanted)


def test_a_rule_whose_value_has_another_shape_is_refused() -> None:
    f = sf.custom_jvp(lambda x: x * 2)
    f.defjvp(lambda xs, ts: (xs[0].sum(), ts[0].sum()))
    with pytest.raises(sf.TreeError) as error:
        sf.grad(lambda x: f(x).sum())(torch.ones(2))
    assert str(error.value).startswith(
        "custom_jvp(<lambda>): the results of the rule do not match those of the function"
    )
