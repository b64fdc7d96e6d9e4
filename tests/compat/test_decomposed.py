"""Compiled ops have torch's values where Inductor's own form of them has others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardfn as sf

torch.manual_seed(0)
TENTHS = torch.arange(-50, 50) * 0.1
ODD = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1.0, 2.0])
X = torch.cat([torch.randn(200) * 10, TENTHS, TENTHS, ODD]).double()
Y = torch.cat([torch.randn(200), torch.full((100,), 0.1), TENTHS.flip(0), ODD.roll(1)])
HALVES = (torch.float16, torch.bfloat16)
OPS: dict[str, Callable[[Any, Any], Any]] = {
    "x // 0.1": lambda x, y: x // 0.1,
    "x // -0.1": lambda x, y: x // -0.1,
    "x // 0.0": lambda x, y: x // 0.0,
    "x // 1": lambda x, y: x // 1,
    "x // y": lambda x, y: x // y,
    "2.5 // y": lambda x, y: 2.5 // y,
    "integers // 0.3": lambda x, y: y.nan_to_num(0, 9, -9).int() // 0.3,
    "x % 0.1": lambda x, y: x % 0.1,
    "x % y": lambda x, y: x % y,
    "2.5 % y": lambda x, y: 2.5 % y,
    "fmod": lambda x, y: torch.fmod(x, y),
    "fmod of 0.1": lambda x, y: torch.fmod(x, 0.1),
    "x * 0": lambda x, y: x * 0,
    "x * False": lambda x, y: x * False,
    "0 / x": lambda x, y: 0 / x,
    "a loss that is no number": lambda x, y: y[0] + 0 * x.sum(),
}
OF_TWO = {"x // y", "2.5 // y"}  # in 16 bits torch rounds between their steps


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal values of one dtype, zeros with their signs."""
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    is_number = ~expected.isnan()
    signs = torch.signbit(found) == torch.signbit(expected)
    assert (signs | ~is_number).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES], ids=str)
def test_compiled_ops_have_the_values_of_torch(dtype: torch.dtype) -> None:
    x, y = X.to(dtype), Y.to(dtype)
    known = [name for name in OPS if dtype not in HALVES or name not in OF_TWO]
    fn = lambda x, y: [OPS[name](x, y) for name in known]
    for found, expected in zip(sf.jit(fn)(x, y), fn(x, y), strict=True):
        assert_same(found, expected)


def test_gradients_of_rests_are_those_of_torch() -> None:
    x, y = torch.randn(2, 30, dtype=torch.float64).unbind()
    fn = lambda x, y: (x % y * y + torch.fmod(x, 0.3) * x).sum()
    inputs = [x.clone().requires_grad_(), y.clone().requires_grad_()]
    expected = torch.autograd.grad(fn(*inputs), inputs)
    found = sf.jit(sf.grad(fn, argnums=(0, 1)))(x, y)
    torch.testing.assert_close(found, expected)


INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
SUMS: dict[str, Callable[[torch.dtype], Any]] = {
    "of integers": lambda t: torch.tensor([[100, 100, -3]]).mT.cumsum(0, dtype=t),
    "of floats": lambda t: torch.tensor([100.7, 100.2, -3.5]).cumsum(0, dtype=t),
    "of one float": lambda t: torch.full((5,), 1.5).cumsum(0, dtype=t),
    "of one integer": lambda t: torch.full((5,), 100, dtype=t).cumsum(0, dtype=t),
    "of truths": lambda t: torch.full((5,), 7, dtype=torch.bool).cumsum(0, dtype=t),
    "of truths, as integers": lambda t: torch.ones(5, dtype=torch.bool).cumsum(0) + t.itemsize,
    "and what follows": lambda t: torch.arange(9).cumsum(0, dtype=t) // 7,
}


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.bfloat16, torch.float64], ids=str)
def test_cumulative_sums_have_the_dtype_and_the_values_of_torch(dtype: torch.dtype) -> None:
    fn = lambda: [make(dtype) for make in SUMS.values()]
    for found, expected in zip(sf.jit(fn)(), fn(), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
