"""The proof of a sharding rule: right rules pass, and wrong ones are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.partition.rules import matmul, pointwise
from shardfn.transforms.proofs._proof import prove_gradient, prove_values

aten = torch.ops.aten
G = torch.Generator().manual_seed(0)
X = torch.randn(6, 4, generator=G, dtype=torch.float64)
W = torch.randn(4, 7, generator=G, dtype=torch.float64)


def test_rules_of_the_library_pass() -> None:
    prove_values(matmul.TABLE[aten.mm.default].rule, aten.mm.default, (X, W), {})
    prove_values(pointwise.pointwise, aten.add.Tensor, (X, X[0]), {"alpha": 2})


WRONG: dict[str, tuple[Any, Any, str]] = {
    "an op along the dim": (
        aten.cumsum.default,
        lambda call: [((0,), (0,))],
        "result 0, shape (6, 4)",
    ),
    "not linear": (aten.exp.default, lambda call: [(("sum",), ("sum",))], "result 0, shape (6, 4)"),
    "another shape": (aten.sum.default, lambda call: [((0,), ("R",))], "result 0, shape ()"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_strategy_is_refused_with_what_differs(name: str) -> None:
    target, rule, text = WRONG[name]
    args = (X, 0) if target is aten.cumsum.default else (X,)
    with pytest.raises(sf.RuleError) as caught:
        prove_values(rule, target, args, {})
    said = str(caught.value)
    assert f"rule({target})" in said and text in said and "2 ranks" in said


def test_an_op_that_fails_on_shards_is_refused_with_its_words() -> None:
    rule = lambda call: [((0, "R"), ("R",))]
    with pytest.raises(sf.RuleError, match="the op fails on the shards"):
        prove_values(rule, aten.add.Tensor, (X, X), {})


def test_a_gradient_is_proved_where_there_is_one() -> None:
    prove_gradient(pointwise.pointwise, aten.sin.default, (X,), {})
    integers = torch.arange(6)
    prove_gradient(pointwise.pointwise, aten.add.Tensor, (integers, integers), {})
