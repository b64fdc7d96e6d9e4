"""What sf.random refuses, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import random
from shardfn.errors import ShardError

KEY = random.key(0)
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a float as a key": (
        lambda: random.uniform(0.5),  # type: ignore[arg-type]
        "random.uniform: key is a float",
    ),
    "a floating tensor as a key": (
        lambda: random.normal(torch.zeros(2)),
        r"random.normal: key is a torch.float32 of shape \(2,\)",
    ),
    "several keys": (
        lambda: random.bits(random.split(KEY, 3)),
        r"random.bits: key is a batch of keys, of shape \(3, 2\)",
    ),
    "a negative size": (
        lambda: random.uniform(KEY, (2, -1)),
        r"random.uniform: shape is \(2, -1\)",
    ),
    "integers that are uniform": (
        lambda: random.uniform(KEY, (2,), torch.int64),
        "random.uniform: dtype is torch.int64",
    ),
    "floating bits": (
        lambda: random.bits(KEY, (2,), torch.float32),
        "random.bits: dtype is torch.float32",
    ),
    "a probability above 1": (
        lambda: random.bernoulli(KEY, 1.5),
        "random.bernoulli: p is 1.5",
    ),
    "a negative rate": (
        lambda: random.dropout(KEY, torch.ones(2), -0.1),
        "random.dropout: rate is -0.1",
    ),
    "an empty range": (
        lambda: random.randint(KEY, (2,), 5, 5),
        "random.randint: minval is 5, maxval is 5",
    ),
    "a shape without the parameter's": (
        lambda: random.gamma(KEY, torch.ones(3), (2,)),
        r"random.gamma: shape is \(2,\)",
    ),
    "a key of another device": (
        lambda: random.dropout(KEY, torch.ones(2, device="meta"), 0.5),
        "random.dropout: key is on cpu",
    ),
    "a seed that is no int": (
        lambda: random.key(1.5),  # type: ignore[arg-type]
        "random.key: seed is 1.5",
    ),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("wrap", ["eager", "jit"])
def test_bad_input_is_refused_by_name(name: str, wrap: str) -> None:
    fn, text = WRONG[name]
    with pytest.raises(ShardError, match=text):
        fn() if wrap == "eager" else sf.jit(lambda x: (fn(), x))(torch.ones(2))
