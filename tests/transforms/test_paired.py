"""Two trees that must match: paired by path, checked leaf by leaf."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.transforms import _paired
from shardfn.transforms._paired import (
    check_leaves,
    compare_sizes,
    described,
    is_divided,
    kind,
    paired,
    scalar,
    zero_like,
)

X, HALF, INTS = torch.ones(2, 3), torch.ones(2, 3).half(), torch.arange(3)


def match(tree: Any, like: Any, **options: Any) -> Any:
    names, paths = ("the tangents", "the primals"), ("tangents", "primals")
    return paired("jvp(f)", tree, like, names, paths, **options)


def test_leaves_come_in_the_order_of_the_other_tree() -> None:
    y = torch.zeros(2, 3)
    first, second = match({"b": y, "a": X}, {"a": X, "b": y})
    assert first is X and second is y


MISMATCHES = [
    (HALF, X, "tangents is (2, 3) torch.float16, primals is (2, 3) torch.float32"),
    ([X, X], [X], "the tangents have also [1]"),
    (3, X, "tangents is a int, primals is (2, 3) torch.float32"),
    (X, 3, "tangents is (2, 3) torch.float32, primals is a int"),
    (None, X, "tangents is a NoneType"),
]


@pytest.mark.parametrize(("tree", "like", "text"), MISMATCHES, ids=lambda x: str(x)[:20])
def test_a_mismatch_names_both_leaves(tree: Any, like: Any, text: str) -> None:
    with pytest.raises(sf.TreeError) as caught:
        match(tree, like)
    said = str(caught.value)
    assert said.startswith("jvp(f): the tangents do not match the primals\n")
    assert (text in said and caught.value.arg_path.startswith("tangents")) or "also" in text


def test_numbers_fit_each_other_and_none_fits_what_has_no_derivative() -> None:
    assert match([2.0, None, None], [3, INTS, "text"]) == [2.0, None, None]
    assert match(None, X, is_zero=lambda x: x is None) == [None]


def test_the_kind_of_a_leaf_is_a_constant() -> None:
    assert kind(X) == ((2, 3), torch.float32) and kind(3.0) == "float"
    assert described(kind(X)) == "(2, 3) torch.float32" and described("int") == "a int"


def test_sizes_of_dims_are_compared_where_they_exist() -> None:
    assert compare_sizes([X, INTS], [1, 0]) and not compare_sizes([X, INTS], [0, 0])
    assert compare_sizes([X, INTS, 3], [1, None, 0]) and compare_sizes([X, X], [1, 7])
    assert compare_sizes([], [])


def test_numbers_as_tensors_and_zeros() -> None:
    assert (scalar(3, "cpu").shape, scalar(3, "cpu", torch.half).dtype) == ((), torch.half)
    assert [zero_like(x) for x in (3, 2.5, True, "a", None)] == [0, 0.0, False, None, None]
    assert is_divided(X, "a:2=0") and is_divided(X, "")
    assert _paired.multiples(X, 6) == (2, 3) == _paired.numbers(X)


LEAVES = [
    ("floating", kind(X), True), ("floating", "float", False), ("floating", kind(INTS), False),
    ("results", "float", True), ("results", "int", False), ("primals", kind(INTS), True),
    ("primals", "float", False), ("numbers", "int", True), ("numbers", "str", False),
    ("floating", "NoneType", True),
]  # fmt: skip


@pytest.mark.parametrize(("row", "leaf", "is_allowed"), LEAVES, ids=str)
def test_which_leaves_a_row_allows(row: str, leaf: Any, is_allowed: bool) -> None:
    call = lambda: check_leaves("f", "cannot be differentiated", ["x"], [leaf], row)
    if is_allowed:
        return call()
    with pytest.raises(sf.TreeError) as caught:
        call()
    text = str(caught.value)
    assert f"x is {described(leaf)}" in text and _paired.NEEDED[row][1] in text
    return None
