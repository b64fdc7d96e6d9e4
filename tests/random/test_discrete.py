"""Discrete distributions, right at a million draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardfn import random

KEY = random.key(20261122)
N = 1_000_000
P5 = torch.tensor([0.1, 0.2, 0.4, 0.25, 0.05])
DISCRETE: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "bits, 8 of them": (lambda k: random.bits(k, (N,), torch.uint8), torch.full((256,), 1 / 256)),
    "bernoulli": (lambda k: random.bernoulli(k, 0.3, (N,)), torch.tensor([0.7, 0.3])),
    "randint": (lambda k: random.randint(k, (N,), 3, 10) - 3, torch.full((7,), 1 / 7)),
    "categorical": (lambda k: random.categorical(k, P5.log(), shape=(N,)), P5),
    "choice": (lambda k: random.choice(k, 5, (N,)), torch.full((5,), 0.2)),
    "choice by p": (lambda k: random.choice(k, 5, (N,), p=P5), P5),
    "the first of a permutation": (
        lambda k: torch.func.vmap(lambda k: random.permutation(k, 4)[0])(random.split(k, 20_000)),
        torch.full((4,), 0.25),
    ),
}


@pytest.mark.parametrize("name", DISCRETE)
def test_a_million_draws_pass_chi_square(name: str) -> None:
    draw, p = DISCRETE[name]
    drawn = draw(KEY)
    counts = torch.bincount(drawn.flatten().to(torch.int64), minlength=p.numel())
    assert counts.numel() == p.numel()
    wanted = p.double() * drawn.numel()
    chi2, freedom = ((counts - wanted) ** 2 / wanted).sum(), p.numel() - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom) + 15
