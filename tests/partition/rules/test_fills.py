"""Constant tensors: the value that a call fills with, and the placements that it may have."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from shardfn import P
from shardfn.partition.rules import fills

aten = torch.ops.aten
X = torch.ones(3)
CALLS = [
    (aten.full.default, ([2, 3], 7.0), 7.0),
    (aten.full_like.default, (X, 7.0), 7.0),
    (aten.new_full.default, (X, [2], 7.0), 7.0),
    (aten.scalar_tensor.default, (7.0,), 7.0),
    (aten.zeros.default, ([2],), 0),
    (aten.new_zeros.default, (X, [2]), 0),
    (aten.ones.default, ([2],), 1),
    (aten.new_ones.default, (X, [2]), 1),
    (aten.ones_like.default, (X,), 1),
]


@pytest.mark.parametrize(("op", "args", "wanted"), CALLS, ids=lambda x: str(x)[:30])
def test_the_value_is_that_of_the_op(op, args, wanted) -> None:
    assert fills.fill_value(op, args, torch.float32) == wanted
    assert (op(*args) == wanted).all(), "torch fills with it"


def test_an_op_that_computes_fills_with_nothing() -> None:
    assert fills.fill_value(aten.neg.default, (X,), X.dtype) is None


def test_only_zeros_may_be_a_partial_sum() -> None:
    assert fills.fits(0, "sum") and not fills.fits(1, "sum")
    assert all(fills.fits(1, mark) for mark in ("R", 0, "max", "min"))


def test_every_fill_that_takes_the_shape_of_a_tensor_is_listed() -> None:
    ops = {*fills.FILLS, *fills.UNSET}
    like = {op for op in ops if str(op).endswith("_like.default")}
    assert like == fills.LIKE


ACTIVATIONS = [
    *("celu", "elu", "gelu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid"),
    *("mish", "relu", "relu6", "selu", "sigmoid", "silu", "softplus", "softsign", "tanh"),
]


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("planner", ["greedy", "global"])
def test_the_gradient_of_an_activation_sends_nothing(name: str, planner: str) -> None:
    fn = getattr(torch.nn.functional, name)
    gradient = sf.grad(lambda x, g: (fn(x) * g).sum())
    with sf.fake_world(4):
        mesh = sf.make_mesh((4,), ("cp",))
        balanced = P(None, sf.zigzag("cp"))
        x, g = (torch.randn(3, 24, 60, dtype=torch.float64) for _ in range(2))
        sharded = sf.shard(gradient, mesh, balanced, balanced, planner=planner, backend="aten")
        assert not sharded.lower(x, g).explain().collectives
        torch.testing.assert_close(sf.full(sharded(x, g)), gradient(x, g))


def test_a_copy_of_a_constant_in_another_dtype_is_cast() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x).copy_(torch.full(x.shape, 2.7)) + x

    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        x = torch.arange(7)
        got = sf.shard(fn, mesh, P("dp"), backend="aten")(x)
        torch.testing.assert_close(sf.full(got), fn(x))


DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.complex64,
    torch.int8,
    torch.int64,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_open_values_are_those_that_deterministic_torch_promises(dtype: torch.dtype) -> None:
    functions = {
        "empty": lambda x: torch.empty(7, dtype=dtype),
        "empty_like": torch.empty_like,
        "new_empty": lambda x: x.new_empty(7),
        "empty_strided": lambda x: torch.empty_strided((7,), (1,), dtype=dtype),
    }
    torch.use_deterministic_algorithms(True)
    try:
        with sf.fake_world(2):
            mesh = sf.make_mesh((2,), ("dp",))
            x = torch.ones(7).to(dtype)
            for name, fn in functions.items():
                got = sf.full(sf.shard(fn, mesh, (P("dp"),), backend="aten")(x))
                torch.testing.assert_close(got, fn(x), equal_nan=True, msg=name)
    finally:
        torch.use_deterministic_algorithms(False)
