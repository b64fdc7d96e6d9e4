"""`dynamic`: which dims of which arguments may change, and what does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.export import Dim

import shardfn as sf
from shardfn.runtime.arguments.dynamic import dims_of, marked
from shardfn.runtime.options import Request

X, Y = torch.ones(2, 3), torch.ones(4)


def fn(x: Any, y: Any = None, *, scale: Any = None) -> Any: ...


def dims(dynamic: Any, *args: Any, **kwargs: Any) -> dict[int, dict[int, bool]]:
    request = Request("f", fn, fn, dynamic=dynamic)
    paths = [f"leaf {i}" for i in range(9)]
    count = len(torch.utils._pytree.tree_leaves((args, kwargs)))
    return dims_of(request, args, kwargs, paths[:count])


FITTING = [
    (None, {}),
    (0, {0: {0: False}, 1: {0: False}}),
    ((1,), {0: {1: False}}),
    (({0, -1}, 0), {0: {0: False, 1: False}, 1: {0: False}}),
    ((True, None), {0: {0: False, 1: False}}),
    ({"y": 0}, {1: {0: False}}),
    (({1: Dim.AUTO, 0: Dim.DYNAMIC}, False), {0: {1: False, 0: True}}),
]


@pytest.mark.parametrize(("dynamic", "wanted"), FITTING, ids=str)
def test_a_leaf_of_dynamic_names_dims(dynamic: Any, wanted: Any) -> None:
    assert dims(dynamic, X, Y) == wanted


def test_a_leaf_stands_for_a_tree() -> None:
    found = dims((0,), {"a": X, "b": [Y]})
    assert found == {0: {0: False}, 1: {0: False}}


WRONG = [
    ((2,), "leaf 0: there is no dim 2 in shape (2, 3)"),
    (({0, "a"},), "leaf 0: 'a' is not a dim"),
    (({"z": 0}), "f, dynamic: there is no argument 'z'"),
    ((0, 0, 0), "f, dynamic: 3 entries for 2 positional arguments"),
    ("rows", "f, dynamic: a str"),
]


@pytest.mark.parametrize(("dynamic", "text"), WRONG, ids=str)
def test_what_does_not_fit_is_refused(dynamic: Any, text: str) -> None:
    with pytest.raises(sf.TreeError) as caught:
        dims(dynamic, X, Y)
    assert text in str(caught.value)
    assert "a prefix tree over the arguments" in str(caught.value)


def test_a_number_has_no_dims() -> None:
    with pytest.raises(sf.TreeError, match="leaf 1: a int has no dims"):
        dims((None, 0), X, 3)


def test_marks_of_tensors_count_too() -> None:
    marks = sf.mark_dynamic(torch.ones(2, 3), 1)
    x = marks if isinstance(marks, torch.Tensor) else torch.ones(2, 3)
    if not isinstance(marks, torch.Tensor):
        sf.mark_dynamic(x, 1)
    assert marked(x).keys() == {1} and marked(3) == {}
    assert dims(None, x)[0].keys() == {1}
    assert dims((0,), x)[0].keys() == {0, 1}
