"""Distributions as functions of uniform numbers: their quantiles, and their ends."""

from __future__ import annotations

import math

import pytest
import torch

from shardfn.random import from_uniform as of

U = torch.linspace(0, 1, 9, dtype=torch.float64)[:-1]


def test_the_median_and_the_quantiles() -> None:
    half = torch.tensor([0.5], dtype=torch.float64)
    assert abs(float(of.normal(half))) < 1e-12
    assert float(of.exponential(half)) == pytest.approx(math.log(2))
    assert float(of.gumbel(half)) == pytest.approx(-math.log(math.log(2)))
    upper = torch.tensor([0.975], dtype=torch.float64)
    assert float(of.normal(upper)) == pytest.approx(1.959963984540054)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_ends_are_finite(dtype: torch.dtype) -> None:
    digits = 53 if dtype == torch.float64 else 24
    ends = torch.tensor([0.0, 1 - 2.0**-digits], dtype=dtype)
    for made in (of.normal, of.exponential, of.gumbel):
        assert made(ends).isfinite().all(), made.__name__


def test_centred_numbers_are_symmetric_and_never_zero() -> None:
    n = 2.0**-24
    steps = torch.tensor([0.0, 0.5 - n, 0.5, 1 - n])
    centred = of.centred(steps)
    assert centred.abs().max() < 1 and (centred != 0).all()
    assert torch.equal(centred, -centred.flip(0))


def test_truncated_numbers_lie_between_their_ends() -> None:
    first, last = (math.erf(x / math.sqrt(2)) for x in (-1.0, 2.0))
    drawn = of.truncated_normal(U, first, last)
    assert (drawn > -1).all() and (drawn < 2).all()
    assert (drawn.diff() > 0).all(), "a monotone function of u"


def test_only_double_precision_is_computed_in_double_precision() -> None:
    assert of.compute_dtype(torch.float64) == torch.float64
    assert {of.compute_dtype(d) for d in (torch.float16, torch.bfloat16, torch.float32)} == {
        torch.float32
    }
