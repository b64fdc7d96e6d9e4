"""What sf.random refuses, by name."""

from __future__ import annotations

import re
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
    "a probability above 1": (lambda: random.bernoulli(KEY, 1.5), "random.bernoulli: p is 1.5"),
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
    "bounds that are no integers": (
        lambda: random.randint(KEY, (2,), 0.5, 3.5),  # type: ignore[arg-type]
        "random.randint: minval is 0.5, maxval is 3.5",
    ),
    "a size that is no integer": (
        lambda: random.normal(KEY, 2.0),  # type: ignore[arg-type]
        r"random.normal: shape is \(2.0,\)",
    ),
    "a number of keys that is no integer": (
        lambda: random.split(KEY, 2.0),  # type: ignore[arg-type]
        r"random.split: shape is \(2.0,\)",
    ),
    "too few probabilities": (
        lambda: random.choice(KEY, torch.arange(3), (6,), p=torch.tensor([0.0, 1.0])),
        r"random.choice: p has the shape \(2,\)",
    ),
    "too many choices": (
        lambda: random.choice(KEY, torch.arange(3), (5,), replace=False),
        "random.choice: 5 of 3 elements are asked for",
    ),
    "a choice from nothing": (
        lambda: random.choice(KEY, 0, (2,)),
        "random.choice: 2 of 0 elements are asked for",
    ),
    "a dim that a tensor lacks": (
        lambda: random.permutation(KEY, torch.arange(4), axis=2),
        "random.permutation: axis is 2, and the tensor has 1 dims",
    ),
    "a permutation of fewer than none": (
        lambda: random.permutation(KEY, -3),
        r"random.permutation: shape is \(-3,\)",
    ),
    "a fraction in a key": (
        lambda: random.fold_in(KEY, 1.5),  # type: ignore[arg-type]
        "random.fold_in: data is a float",
    ),
    "more than 64 bits in a key": (
        lambda: random.fold_in(KEY, 2**63),
        "random.fold_in: data is 9223372036854775808",
    ),
    "a fraction in a key, as a tensor": (
        lambda: random.fold_in(KEY, torch.tensor(1.5)),
        "random.fold_in: data is a torch.float32 tensor of 0 dims",
    ),
    "several numbers in a key": (
        lambda: random.fold_in(KEY, torch.arange(2)),
        "random.fold_in: data is a torch.int64 tensor of 1 dims",
    ),
    "integers that drop out": (
        lambda: random.dropout(KEY, torch.arange(4), 0.3),
        "random.dropout: x is a torch.int64 tensor",
    ),
    "a negative parameter": (lambda: random.gamma(KEY, -1.0), "random.gamma: a is -1.0"),
    "a second parameter of 0": (lambda: random.beta(KEY, 1.0, 0.0), "random.beta: b is 0.0"),
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


X = torch.linspace(-1, 1, 6)
OF_TORCH: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "bernoulli_": (lambda x: x.clone().bernoulli_(1.5), "torch.bernoulli: p is 1.5"),
    "bernoulli": (lambda x: x.bernoulli(-0.1), "torch.bernoulli: p is -0.1"),
    "uniform_": (
        lambda x: x.clone().uniform_(2, 1),
        "uniform_: the range must not be empty; got start 2.0 and end 1.0",
    ),
    "normal": (lambda x: torch.normal(x, -1.0), "std"),
    "exponential_": (lambda x: x.clone().exponential_(-1.0), "lambd"),
    "geometric_": (lambda x: x.clone().geometric_(1.0), "p"),
    "cauchy_": (lambda x: x.clone().cauchy_(0, -1.0), "sigma"),
    "log_normal_": (lambda x: x.clone().log_normal_(0, -1.0), "std"),
    "randint": (lambda x: torch.randint(5, 5, (3,)), "5"),
    "randint beyond its dtype": (
        lambda x: torch.randint(0, 300, (3,), dtype=torch.uint8),
        "torch.randint: the range from 0 to 300 does not fit torch.uint8",
    ),
    "randint_like": (lambda x: torch.randint_like(x, 0), "minval is 0, maxval is 0"),
    "random_": (lambda x: x.clone().random_(5, 5), "minval is 5, maxval is 5"),
    "rand of integers": (
        lambda x: torch.rand(3, dtype=torch.int64),
        "torch.rand: dtype is torch.int64",
    ),
    "randn of integers": (lambda x: torch.randn(3, dtype=torch.int64), "dtype|float"),
    "dropout": (lambda x: torch.nn.functional.dropout(x, 1.5), "probability"),
    "rrelu": (lambda x: torch.rrelu(x, 0.5, 0.1, True), "bound|range"),
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_what_torch_refuses_of_a_random_call_is_refused_everywhere(name: str) -> None:
    fn, text = OF_TORCH[name]
    with pytest.raises((RuntimeError, ValueError)) as torchs:
        fn(X)
    with pytest.raises((ShardError, torchs.type)) as ours:
        sf.jit(fn)(X)
    assert str(ours.value) == str(torchs.value) or re.search(text, str(ours.value))
    refused = pytest.raises((ShardError, RuntimeError, ValueError), match=text)
    with refused, random.plain():
        fn(X)


def test_a_probability_in_a_tensor_that_is_none_gives_nan() -> None:
    p = torch.tensor([0.0, 1.0, 1.5, -0.5])
    drawn = sf.jit(torch.bernoulli)(p)
    assert drawn.isnan().tolist() == [False, False, True, True]
    assert drawn[:2].tolist() == [0.0, 1.0]


def test_integers_that_a_dtype_does_not_have_are_refused() -> None:
    with pytest.raises(ShardError, match="the range from 0 to 300 does not fit torch.uint8"):
        random.randint(KEY, (3,), 0, 300, torch.uint8)
    with pytest.raises(ShardError, match=r"has more than 2\*\*63 integers"):
        random.randint(KEY, (3,), -(2**63), 2**63 - 1)
    assert random.randint(KEY, (3,), 0, 256, torch.uint8).dtype == torch.uint8


def test_a_function_whose_seed_is_required_may_not_draw_from_the_state() -> None:
    with pytest.raises(ShardError, match="seed=.required") as caught:
        sf.jit(lambda x: torch.dropout(x, 0.5, True), seed="required")(X)
    assert caught.value.source is not None and __file__ in caught.value.source
    with sf.fake_world(2), pytest.raises(ShardError, match="seed=.required"):
        mesh = sf.make_mesh((2,), ("dp",))
        sf.shard(_scanned, mesh, sf.P("dp"), seed="required")(torch.ones(4, 2))
    with_key = sf.jit(lambda key, x: random.dropout(key, x), seed="required")
    assert with_key(KEY, X).shape == X.shape
    with pytest.raises(ShardError, match="seed is 'none'"):
        sf.jit(lambda x: x, seed="none")


def _scanned(x: torch.Tensor) -> torch.Tensor:
    return sf.scan(lambda c, r: (c + torch.rand_like(r), r), torch.zeros(2), x)[0]
