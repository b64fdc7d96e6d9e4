"""Distributions, computed from numbers that are uniform in [0, 1)."""

from __future__ import annotations

import math
from typing import Any

import torch


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a function of random numbers is computed: float64 or float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def positive(u: torch.Tensor) -> torch.Tensor:
    """Map to (0, 1), so that the logarithm is finite."""
    smallest = torch.finfo(u.dtype).tiny
    return u.clamp_min(smallest)


def centred(u: torch.Tensor) -> torch.Tensor:
    """Map to (-1, 1), evenly spaced around zero, which is not among the values."""
    digits = 53 if u.dtype == torch.float64 else 24
    half = 2.0**-digits
    return (2 * u - 1) + half


def normal(u: torch.Tensor) -> torch.Tensor:
    """Map to the normal distribution with mean 0 and variance 1, by the inverse of the error
    function.
    """
    erf = centred(u)
    return math.sqrt(2) * torch.special.erfinv(erf)


def truncated_normal(u: torch.Tensor, first: Any, last: Any) -> torch.Tensor:
    """Map to the normal distribution between the numbers x whose erf(x / sqrt(2)) is `first` and
    `last`.
    """
    share = (centred(u) + 1) / 2  # in (0, 1)
    erf = first + share * (last - first)
    return math.sqrt(2) * torch.special.erfinv(erf)


def exponential(u: torch.Tensor) -> torch.Tensor:
    """Map to the exponential distribution with mean 1."""
    return -torch.log1p(-u)


def gumbel(u: torch.Tensor) -> torch.Tensor:
    """Map to the standard Gumbel distribution."""
    waiting = -torch.log(positive(u))  # exponential
    return -torch.log(waiting)
