"""A known structure is found again in one walk, and no other structure passes for it."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from support.stages.native import way

import shardfn as sf
from shardfn import _tree
from shardfn.runtime import cache
from shardfn.runtime.arguments import leaves_like

__all__ = ["way"]
pytestmark = pytest.mark.usefixtures("way")

Pair = namedtuple("Pair", "a b")


class Row(list):
    """A list of another class."""


TREES: list[Any] = [
    1,
    (),
    {},
    [],
    (1, 2),
    [1, 2],
    Pair(1, 2),
    Row([1, 2]),
    torch.Size([1, 2]),
    {"a": 1, "b": 2},
    {"b": 2, "a": 1},
    {"a": 1},
    {"a": 1, "c": 2},
    {"a": 1, "b": (2,)},
    {"a": {}, "b": 2},
    OrderedDict(a=1, b=2),
    defaultdict(int, a=1, b=2),
    ({"w": {"a": 1, "b": 2}, "v": {"a": 3}}, {}),
    ({"w": {"a": 1, "b": 2}, "v": {"b": 3}}, {}),
    ({"w": {"a": 1, "b": 2}, "v": 3}, {}),
]


@pytest.mark.parametrize("tree", TREES, ids=repr)
def test_only_trees_of_the_structure_are_read(tree: Any) -> None:
    leaves, treedef = _tree.flatten(tree)
    read = leaves_like(treedef)
    if read is None:
        assert {type(tree)} & {OrderedDict, defaultdict, Pair}
        return
    assert read(tree) == leaves
    for other in TREES:
        among, structure = _tree.flatten(other)
        found = read(other)
        if structure == treedef:
            assert found == among
        else:  # a container may stand in the place of a leaf, and is found there
            assert found is None or found != among


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
    before = cache.counts["captures"]
    STEP(kind(a=x, b=y))
    assert cache.counts["captures"] == before
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
