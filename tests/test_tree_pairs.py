"""Two trees side by side: dicts by key, all else by position, and every mismatch listed."""

from __future__ import annotations

import time
from collections import OrderedDict, deque, namedtuple

import pytest
import torch

from shardfn.tree_pairs import broadcast_prefix, classes, is_node, pair

NAMES = ("tangents", "primals")
Pair = namedtuple("Pair", "a b")
X = torch.ones(2)


def test_dicts_are_paired_by_key_in_the_order_of_the_other() -> None:
    found, wrong = pair({"b": 2, "a": 1}, {"a": 10, "b": 20}, NAMES)
    assert (found, wrong) == ([1, 2], [])
    found, wrong = pair(OrderedDict(b=2, a=1), {"a": 10, "b": 20}, NAMES)
    assert (found, wrong) == ([1, 2], []), "all dicts count as one type"


def test_other_containers_are_paired_by_position() -> None:
    found, wrong = pair([1, (2, Pair(3, 4))], [0, (0, Pair(0, 0))], NAMES)
    assert (found, wrong) == ([1, 2, 3, 4], [])


WRONG = {
    "lacks a key": ({"a": 1}, {"a": 1, "b": 2}, "x: tangents lack ['b']"),
    "has a key": ({"a": 1, "c": 2, "d": 3}, {"a": 1}, "x: tangents have also ['c'], ['d']"),
    "is shorter": ([1], [1, 2], "x: tangents lack [1]"),
    "another container": ((1,), [1], "x: tangents have a tuple, primals have a list"),
    "a leaf for a tree": (3, [1], "x: tangents have a leaf 3, primals have a list"),
    "a tree for a tensor": ([3], X, "x: tangents have a list, primals have a tensor"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mismatch_is_named_by_its_path(name: str) -> None:
    tree, like, text = WRONG[name]
    found, wrong = pair(tree, like, NAMES, "x")
    assert wrong == [text] and all(leaf is None for leaf in found)


def test_all_mismatches_are_listed_and_the_rest_is_paired() -> None:
    tree = {"a": [1], "b": {"c": 2}, "d": 5}
    like = {"a": [1, 2], "b": {"e": 2}, "d": 0}
    found, wrong = pair(tree, like, NAMES)
    assert wrong == [
        "['a']: tangents lack [1]",
        "['b']: tangents lack ['e']; tangents have also ['c']",
    ]
    assert found == [None, None, None, 5]


def test_a_leaf_of_a_prefix_stands_for_all_below_it() -> None:
    tree = {"a": [1, 2], "b": 3}
    is_leaf = lambda x: isinstance(x, str)
    assert broadcast_prefix({"a": "p", "b": "q"}, tree, is_leaf) == ["p", "p", "q"]
    assert broadcast_prefix("p", tree, is_leaf) == ["p"] * 3
    assert broadcast_prefix(None, [1, 2], is_leaf) == [None, None]
    with pytest.raises(ValueError) as caught:
        broadcast_prefix({"a": ["p"], "b": "q"}, tree, is_leaf)
    assert caught.value.args == ("['a']: placements lack [1]",)


def test_containers_and_leaves() -> None:
    assert all(map(is_node, ([], (), {}, Pair(1, 2))))
    assert not any(map(is_node, (X, 3, "text")))


def test_containers_of_other_classes_are_found_with_their_paths() -> None:
    tree = {"a": [X.max(0), time.gmtime(0)], "b": Pair(1, deque([2]))}
    assert classes(tree, "x") == [("x['a'][1]", "struct_time")]
