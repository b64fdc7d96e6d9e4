"""Under vmap, a branch that a sample does not take, or a step after its last, has no part in its
gradient, whatever its derivative there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P

F64 = torch.float64
MIXED = torch.tensor([-1.0, 0.5, -2.0, 3.0, 0.25], dtype=F64)
SHARED = torch.tensor(1.7, dtype=F64)
SAMPLES = {"some": MIXED, "none": -MIXED.abs() - 1, "all": MIXED.abs() + 0.5}
Fn = Callable[[Tensor, Tensor], Tensor]


def of_operands(x: Tensor, c: Tensor) -> Tensor:
    return sf.cond(x > 0, lambda x, c: torch.sqrt(x) * c, lambda x, c: 2 * x + c, x, c)


def of_closed_over(x: Tensor, c: Tensor) -> Tensor:
    return sf.cond(x > 0, lambda: torch.sqrt(x * c), lambda: 2 * x * c)


def of_shared(x: Tensor, c: Tensor) -> Tensor:
    """nan in the branch, also of what all samples share."""
    return sf.cond(x > 0, lambda: torch.log(x * c).sqrt().exp(), lambda: c.log())


def of_torch(x: Tensor, c: Tensor) -> Tensor:
    return torch.cond(x > 0, lambda x, c: torch.sqrt(x) * c, lambda x, c: 2 * x + c, (x, c))


def of_loop(x: Tensor, c: Tensor) -> Tensor:
    """A step after the last would take the root of a negative number."""
    return sf.while_loop(lambda v: v < 2, lambda v: torch.sqrt(2.5 - v) * c + v + 0.3, x)


def checkpointed(x: Tensor, c: Tensor) -> Tensor:
    return sf.cond(x > 0, sf.checkpoint(lambda x: torch.sqrt(x) * c), lambda x: 2 * x, x)


def nested(x: Tensor, c: Tensor) -> Tensor:
    inner = lambda x: sf.cond(x > 1, lambda x: torch.sqrt(x - 1), lambda x: x * c, x)
    return sf.cond(x > 0, inner, lambda x: torch.log(-x), x)


def python(x: Tensor, c: Tensor, fn: Fn) -> Tensor:
    """The same for one sample, by Python's own branches and loops."""
    if fn is of_loop:
        while x < 2:
            x = torch.sqrt(2.5 - x) * c + x + 0.3
        return x
    if fn is nested:
        return ((x - 1).sqrt() if x > 1 else x * c) if x > 0 else torch.log(-x)
    if fn is of_closed_over:
        return torch.sqrt(x * c) if x > 0 else 2 * x * c
    if fn is of_shared:
        return torch.log(x * c).sqrt().exp() if x > 0 else c.log() + 0 * x
    root = torch.sqrt(x) * c
    return root if x > 0 else 2 * x + (0 if fn is checkpointed else c)


def wanted(fn: Fn, xs: Tensor, c: Tensor, order: int) -> Any:
    leaves = [xs.clone().requires_grad_(), c.clone().requires_grad_()]
    total = sum(python(x, leaves[1], fn) for x in leaves[0])
    found = torch.autograd.grad(total, leaves, create_graph=True, materialize_grads=True)
    for _ in range(order - 1):
        total = sum(g.sum() for g in found)
        found = torch.autograd.grad(total, leaves, create_graph=True, materialize_grads=True)
    return [g.detach() for g in found]


def total(fn: Fn) -> Fn:
    return lambda xs, c: sf.vmap(fn, in_axes=(0, None))(xs, c).sum()


CASES = (of_operands, of_closed_over, of_shared, of_torch, of_loop, checkpointed, nested)


@pytest.mark.parametrize("which", SAMPLES)
@pytest.mark.parametrize("fn", CASES)
def test_the_gradient_of_vmap_equals_that_of_each_sample(fn: Fn, which: str) -> None:
    xs = (
        SAMPLES[which]
        if fn is not of_shared
        else SAMPLES[which].abs().add(1) * SAMPLES[which].sign()
    )
    found = sf.grad(total(fn), argnums=(0, 1))(xs, SHARED)
    assert_close(list(found), wanted(fn, xs, SHARED, 1), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("fn", [of_operands, of_loop])
def test_so_do_derivatives_of_second_order(fn: Fn) -> None:
    def twice(xs: Tensor, c: Tensor) -> Tensor:
        first, second = sf.grad(total(fn), argnums=(0, 1))(xs, c)
        return first.sum() + second

    found = sf.grad(twice, argnums=(0, 1))(MIXED, SHARED)
    assert_close(list(found), wanted(fn, MIXED, SHARED, 2), rtol=1e-9, atol=1e-11)


def test_so_do_jacobians_pullbacks_and_gradients_from_outside() -> None:
    mapped = lambda xs: sf.vmap(of_operands, in_axes=(0, None))(xs, SHARED)
    gradient, _ = wanted(of_operands, MIXED, SHARED, 1)
    second = torch.where(MIXED > 0, -0.25 * MIXED.abs() ** -1.5 * SHARED, 0.0)
    assert_close(sf.jacrev(mapped)(MIXED), gradient.diag())
    assert_close(sf.jacfwd(mapped)(MIXED), gradient.diag())
    assert_close(sf.vjp(mapped, MIXED)[1](torch.ones(5, dtype=F64))[0], gradient)
    assert_close(sf.hessian(lambda xs: mapped(xs).sum())(MIXED), second.diag())
    xs = MIXED.clone().requires_grad_()
    with simulated(a=2) as mesh:
        out = sf.shard(mapped, mesh, P("a"), backend="aten")(xs)
        sf.full(out).sum().backward()
    assert_close(xs.grad, gradient)


def test_so_does_a_branch_of_torch_func_that_nothing_captures() -> None:
    branch = lambda x: sf.cond(x > 0, torch.sqrt, lambda x: 2 * x, x)
    gradient = torch.where(MIXED > 0, 0.5 * MIXED.abs() ** -0.5, 2.0)
    found = torch.func.grad(lambda xs: torch.func.vmap(branch)(xs).sum())(MIXED)
    assert_close(found, gradient)
    assert_close(torch.func.grad(branch)(MIXED[0]), gradient[0])


@pytest.mark.parametrize("order", ["hessian", "forward over forward"])
def test_second_derivatives_of_samples_are_those_of_each(order: str) -> None:
    fn = lambda x: sf.cond(x.sum() > 0, lambda x: x.sin() * x, lambda x: x**3, x).sum()
    plain = lambda x: (x.sin() * x if x.sum() > 0 else x**3).sum()
    xs = torch.tensor([[1.0, 2.0, 3.0], [-1.0, -2.0, 0.5]], dtype=torch.float64)
    second = sf.hessian(fn) if order == "hessian" else sf.jacfwd(sf.jacfwd(fn))
    want = torch.stack([torch.autograd.functional.hessian(plain, x) for x in xs])
    assert_close(sf.vmap(second)(xs), want)


COUNTS = torch.tensor([0, 2, 7, 4, 3])
TABLE = torch.arange(5, dtype=F64) + 1
NUMBERS = torch.stack([torch.eye(3) * k for k in (1, 0, 3, 0, -2)]).to(F64)


def below(taken: Callable[[Tensor], Tensor], other: Tensor) -> Callable[[Tensor], Tensor]:
    """A lookup in five rows, of the samples below five."""
    return lambda k: sf.cond(k < 5, taken, lambda k: other, k)


def written(k: Tensor) -> Tensor:
    y = TABLE + 0 * k
    y[k] = -1.0
    return y


def divided(k: Tensor) -> Tensor:
    return sf.cond(k > 0, lambda k: TABLE[k // k], lambda k: TABLE[0] * 3, k)


def greatest(k: Tensor) -> Tensor:
    """The greatest common divisor: a step after the last would divide by zero."""
    step = lambda pair: (pair[1], pair[0] % pair[1])
    return sf.while_loop(lambda pair: pair[1] > 0, step, (k + 12, k))[0]


def looked_up(k: Tensor) -> Tensor:
    """A step after the last would look beyond the table."""
    step = lambda pair: (pair[0] + 1, pair[1] + TABLE[pair[0]])
    return sf.while_loop(lambda pair: pair[0] < 5, step, (k, TABLE[0] * 0))[1]


# functions of one sample with a branch or a step that raises an error for other samples
RAISING: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "quotient": (lambda k: sf.cond(k != 0, lambda k: 84 // k, lambda k: k, k), COUNTS),
    "truncated": (
        lambda k: sf.cond(k != 0, lambda k: k.div(k, rounding_mode="trunc"), lambda k: k, k),
        COUNTS,
    ),
    "index": (below(lambda k: TABLE[k], TABLE[0]), COUNTS),
    "gather": (below(lambda k: TABLE.gather(0, k[None]), TABLE[1:2]), COUNTS),
    "write": (below(written, TABLE), COUNTS),
    "one_hot": (below(lambda k: F.one_hot(k, 5), torch.arange(5)), COUNTS),
    "nested": (below(divided, TABLE[1]), COUNTS),
    "cholesky": (
        lambda m: sf.cond(m[0, 0] > 0, torch.linalg.cholesky, lambda m: m * 2, m),
        NUMBERS,
    ),
    "inverse": (lambda m: sf.cond(m[0, 0] != 0, torch.linalg.inv, lambda m: m * 2, m), NUMBERS),
    "greatest common divisor": (greatest, COUNTS),
    "step after the last": (looked_up, COUNTS),
}


@pytest.mark.parametrize("name", RAISING)
def test_a_branch_that_raises_does_so_only_for_samples_that_take_it(name: str) -> None:
    fn, samples = RAISING[name]
    each = [sf.jit(fn, backend="aten")(x) for x in samples]
    mapped = lambda xs: sf.vmap(fn)(xs)
    assert_close(sf.jit(mapped, backend="aten")(samples), torch.stack(each))
    for k in range(len(samples)):  # all take it, or none
        assert_close(sf.jit(mapped, backend="aten")(samples[[k, k]]), torch.stack([each[k]] * 2))
    with simulated(a=2) as mesh:
        out = sf.shard(mapped, mesh, P("a"), backend="aten")(samples)
        assert_close(sf.full(out), torch.stack(each))
    twice = lambda xs: sf.vmap(sf.vmap(fn))(xs)
    found = sf.jit(twice, backend="aten")(torch.stack([samples, samples.flip(0)]))
    assert_close(found, torch.stack([torch.stack(each), torch.stack(each[::-1])]))


@pytest.mark.parametrize("name", ["index", "nested", "step after the last", "inverse"])
def test_so_it_does_when_compiled(name: str) -> None:
    fn, samples = RAISING[name]
    each = [sf.jit(fn, backend="aten")(x) for x in samples]
    assert_close(sf.jit(lambda xs: sf.vmap(fn)(xs), backend="inductor")(samples), torch.stack(each))


def test_gradients_of_a_branch_that_raises() -> None:
    fn = lambda m: sf.cond(m[0, 0] != 0, torch.linalg.inv, lambda m: m * 2, m)
    found = sf.grad(lambda ms: sf.vmap(fn)(ms).sum())(NUMBERS)
    for m, gradient in zip(NUMBERS, found, strict=True):
        taken = torch.linalg.inv if m[0, 0] != 0 else lambda m: m * 2
        assert_close(gradient, torch.func.grad(lambda m, taken=taken: taken(m).sum())(m))


@pytest.mark.parametrize("looks_up", [True, False])
def test_gradients_of_a_branch_that_raises_and_draws(looks_up: bool) -> None:
    """A sample's value is its gradient times x, with the same random numbers in both."""
    row = lambda k: TABLE[k] if looks_up else TABLE[0]
    draws = lambda x, k: row(k) * x * torch.rand_like(x)
    fn = lambda x, k: sf.cond(x.sum() * k < 25, draws, lambda x, k: x * torch.rand_like(x), x, k)
    x = torch.tensor([2.0, 3.0], dtype=F64).expand(5, 2)
    factors = torch.where(COUNTS < 5, TABLE[COUNTS % 5] if looks_up else 1.0, 1.0)[:, None]

    def both(x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        value, pull = sf.vjp(lambda x: sf.vmap(fn, randomness="different")(x, k), x)
        return value, pull(torch.ones_like(value))[0]

    with simulated(a=2) as mesh:
        for call in (sf.jit(both, backend="aten"), sf.shard(both, mesh, P("a"), backend="aten")):
            value, gradient = map(sf.full, call(x, COUNTS))
            assert_close(value, gradient * x)
            drawn = gradient / factors
            assert drawn.min() >= 0 and drawn.max() < 1 and len(drawn.unique()) == 10


def test_a_branch_that_raises_raises_where_a_sample_takes_it() -> None:
    fn = below(lambda k: TABLE[k + 3], TABLE[0])
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        sf.jit(lambda ks: sf.vmap(fn)(ks), backend="aten")(COUNTS)


def test_what_raises_nothing_sends_nothing() -> None:
    """Samples take the operands of others only where an op may raise an error."""
    fn = lambda x: sf.cond(x > 0, lambda x: x.sin() / x, lambda x: x * 2, x)
    with simulated(a=2) as mesh:
        step = sf.shard(lambda xs: sf.vmap(fn)(xs), mesh, P("a"), backend="aten")
        assert "no communication" in str(step.lower(MIXED))
