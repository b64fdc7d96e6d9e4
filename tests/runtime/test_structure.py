"""A known structure is found again in one walk, and no other structure passes for it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from stagings import counts
from support.stages.native import way

import shardfn as sf

__all__ = ["way"]
pytestmark = pytest.mark.usefixtures("way")


def total(tree: Any) -> Any:
    (first, *_) = tree.values()
    return {"sum": sum(tree.values()), "first": first * 1}


STEP = sf.jit(total, backend="aten")


@pytest.mark.parametrize("kind", [dict, OrderedDict], ids=lambda k: k.__name__)
def test_calls_of_one_structure_between_those_of_others(kind: Any) -> None:
    x, y = torch.tensor(2.0), torch.tensor(3.0)
    for _ in range(3):  # from the second call on, the structure is known
        found = STEP(kind(a=x, b=y))
        assert (found["sum"], found["first"]) == (5, 2)
    before = counts["captures"]
    STEP(kind(a=x, b=y))
    assert counts["captures"] == before
    found = STEP(kind(b=y, a=x))  # whose keys come in another order
    assert (found["sum"], found["first"]) == (5, 3)
    found = STEP(kind(a=x, c=y))
    assert (found["sum"], found["first"]) == (5, 2)


def test_the_class_of_a_container_is_that_of_the_call() -> None:
    same = sf.jit(lambda tree: tree, backend="aten")
    for _ in range(3):
        assert type(same({"a": torch.ones(2)})) is dict
    assert type(same(OrderedDict(a=torch.ones(2)))) is OrderedDict


def test_numbers_with_a_neg_bit_count_as_what_they_are() -> None:
    step = sf.jit(lambda x, y: x * 2 + y, backend="aten")
    x, y = torch.tensor(3.0), torch.tensor(1.0)
    negative = torch.tensor(1 + 3j).conj().imag
    assert negative.is_neg()
    for _ in range(3):
        assert step(x, y) == 7
    assert step(negative, y) == -5
    assert step(x, negative) == 3
    assert step(x, y) == 7
