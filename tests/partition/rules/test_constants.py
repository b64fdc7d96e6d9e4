"""Constant tensors: the value that a call fills with, and the placements that it may have."""

from __future__ import annotations

import pytest
import torch

from shardfn.partition.rules import constants

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


@pytest.mark.parametrize(
    ("op", "args", "wanted"), CALLS, ids=lambda x: str(x)[:30]
)
def test_the_value_is_that_of_the_op(op, args, wanted) -> None:
    assert constants.fill_value(op, args) == wanted
    assert (op(*args) == wanted).all(), "torch fills with it"


def test_an_op_that_computes_fills_with_nothing() -> None:
    assert constants.fill_value(aten.neg.default, (X,)) is None


def test_only_zeros_may_be_a_partial_sum() -> None:
    assert constants.fits(0, "sum") and not constants.fits(1, "sum")
    assert all(constants.fits(1, mark) for mark in ("R", 0, "max", "min"))


def test_every_fill_that_takes_the_shape_of_a_tensor_is_listed() -> None:
    like = {op for op in constants.FILLS if str(op).endswith("_like.default")}
    assert like == constants.LIKE
