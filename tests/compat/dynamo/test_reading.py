"""Dynamo reads an argument as a fake tensor of its layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardfn as sf

X = torch.arange(24, dtype=torch.float64).view(2, 3, 4)
LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: X,
    "transposed": lambda: X.mT,
    "expanded": lambda: X[:, :1].expand(2, 5, 4),
    "every second": lambda: X[..., ::2],
    "part": lambda: X[1:, 1:],
    "number": lambda: X[1, 2, 3],
    "empty": lambda: X[:0],
    "integer": lambda: X.long(),
    "complex": lambda: torch.complex(X, -X),
    "parameter": lambda: torch.nn.Parameter(X),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_code_reads_the_layout_of_an_argument(name: str) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weights = [1 + n for n in (*x.shape, *x.stride())]
        kind = 2 if x.dtype.is_floating_point else 3
        return (x * x).sum() * sum(weights, kind) + y

    x, y = LAYOUTS[name](), torch.tensor(3.0, dtype=torch.float64)
    torch.testing.assert_close(sf.jit(fn, backend="aten")(x, y), fn(x, y), rtol=0, atol=0)


def test_an_argument_that_is_first_read_inside_of_a_derivative_is_no_part_of_it() -> None:
    def fn(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return sf.grad(lambda w: (w * x).sum() * (w * y).sum())(w)

    w, x, y = torch.rand(3, 5, dtype=torch.float64)
    expected = x * (w * y).sum() + y * (w * x).sum()
    torch.testing.assert_close(sf.jit(fn, backend="aten")(w, x, y), expected)


def test_an_argument_beside_one_of_dynamic_size_has_constant_sizes() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x[: len(y)].sum() * x.shape[0] + y.sum()

    program = sf.jit(fn, backend="aten", dynamic={"x": 0})
    for n in (5, 7, 8):
        x, y = torch.rand(n, dtype=torch.float64), torch.rand(3, dtype=torch.float64)
        torch.testing.assert_close(program(x, y), fn(x, y), rtol=0, atol=0)


def test_data_of_a_tensor_is_a_constant_of_every_derivative() -> None:
    w = torch.rand(4, dtype=torch.float64)
    constant = sf.hessian(lambda w: (w.detach() * w * w).sum())(w)
    torch.testing.assert_close(sf.hessian(lambda w: (w.data * w * w).sum())(w), constant)
    torch.testing.assert_close(sf.vmap(lambda w: w.data * 2)(w), 2 * w)


def test_data_of_a_parameter_that_the_function_closes_over() -> None:
    weight = torch.nn.Parameter(torch.rand(3, 3, dtype=torch.float64))
    fn = lambda x: torch.mm(weight.data, x @ weight).sum()
    x = torch.rand(3, 3, dtype=torch.float64)
    (expected,) = torch.autograd.grad(fn(x), weight)
    (found,) = torch.autograd.grad(sf.jit(fn, backend="aten")(x), weight)
    torch.testing.assert_close(found, expected)


def constant_made_inside(x: torch.Tensor) -> torch.Tensor:
    eye = torch.eye(3, dtype=x.dtype)
    eye.requires_grad = False
    return (eye * x).sum()


def detached(x: torch.Tensor) -> torch.Tensor:
    y = x.detach() * 2
    y.requires_grad = False
    return (y * x).sum()


def followed(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.requires_grad = False
    return y.sum()


@pytest.mark.parametrize("fn", [constant_made_inside, detached])
def test_a_tensor_without_a_gradient_may_be_told_that_it_has_none(fn: Callable[..., Any]) -> None:
    x = torch.rand(3, dtype=torch.float64)
    torch.testing.assert_close(sf.jit(fn, backend="aten")(x), fn(x))
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(fn(leaf), leaf)
    torch.testing.assert_close(sf.jit(sf.grad(fn), backend="aten")(x), expected)
    (found,) = torch.autograd.grad(sf.jit(fn, backend="aten")(leaf), leaf)
    torch.testing.assert_close(found, expected)


def test_a_tensor_that_a_gradient_follows_is_not_cut_off() -> None:
    x = torch.rand(3, dtype=torch.float64)
    run = sf.jit(followed, backend="aten")
    torch.testing.assert_close(run(x), followed(x))
    with pytest.raises(RuntimeError, match="only change requires_grad flags of leaf variables"):
        followed(x.requires_grad_())
    for refused in (lambda: run(x), lambda: sf.grad(followed)(x.detach())):
        with pytest.raises(sf.CaptureError):
            refused()
