"""Loops, branches and pipelines inside a function that the user compiles with torch.compile have
the values that they have outside.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardfn as sf

X = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)


def pipelined(x: torch.Tensor) -> Any:
    loss = lambda w, x: (x * w).square().mean()
    return sf.pipelined_grad(loss, 3)(torch.ones(1, dtype=torch.float64), x)


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "scan": lambda x: sf.scan(lambda c, row: (c + row, c * row), x[0], x),
    "map": lambda x: sf.map(lambda row: row * 2, x),
    "cond": lambda x: sf.cond(x.sum() < 0, torch.sin, torch.cos, x),
    "while_loop": lambda x: sf.while_loop(lambda c: c.sum() < 100, lambda c: c * 2, x),
    "pipelined_grad": pipelined,
}


@pytest.mark.parametrize("name", CALLS)
def test_values_are_those_outside_of_it(name: str) -> None:
    call = CALLS[name]
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="eager")
    torch.testing.assert_close(compiled(X), call(X), rtol=0, atol=0)


@sf.custom_vjp
def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


@sf.custom_jvp
def cosine(x: torch.Tensor) -> torch.Tensor:
    return x.cos()


sine.defvjp(lambda x: (x.sin(), x), lambda x, g: (2 * g * x.cos(),))
cosine.defjvp(lambda primals, tangents: (primals[0].cos(), -2 * tangents[0] * primals[0].sin()))


@pytest.mark.parametrize("fn", [sine, cosine])
@pytest.mark.parametrize("is_derived", [False, True])
def test_functions_with_a_rule_are_refused_by_name(fn: Any, is_derived: bool) -> None:
    torch._dynamo.reset()
    call = sf.grad(lambda x: fn(x).sum()) if is_derived else fn
    text = "the function has a derivative of its own, which torch.compile cannot trace"
    text = f"{fn.__name__}: {text}"
    with pytest.raises(Exception, match=re.escape(text)):
        torch.compile(lambda x: call(x) + 1, backend="eager")(X)


@pytest.mark.parametrize("fn", [sine, cosine])
def test_a_disabled_function_keeps_its_rule(fn: Any) -> None:
    torch._dynamo.reset()
    disabled = torch.compiler.disable(fn)
    x = X.clone().requires_grad_()
    y = torch.compile(lambda x: disabled(x) + 1, backend="eager")(x)
    torch.testing.assert_close(y, fn(X) + 1)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, sf.grad(lambda x: fn(x).sum())(X))
