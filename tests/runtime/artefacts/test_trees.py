"""Structures go through JSON and come back equal."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict, deque
from typing import Any

import pytest

from shardfn import _tree
from shardfn.compile.text import Unwritable
from shardfn.runtime.artefacts.trees import tree_of, tree_text

TREES: list[Any] = [
    1,
    (),
    [],
    {},
    [1, (2, {"b": 3, "a": [4]})],
    {3: 1, "3": 2, True: None},
    OrderedDict(b=1, a=(2,)),
]


@pytest.mark.parametrize("tree", TREES, ids=repr)
def test_a_tree_comes_back(tree: Any) -> None:
    leaves, treedef = _tree.flatten(tree)
    back = tree_of(json.loads(json.dumps(tree_text(treedef))))
    assert back == treedef and _tree.unflatten(back, leaves) == tree


@pytest.mark.parametrize("tree", [deque([1]), defaultdict(int, a=1), {(1,): 2}])
def test_another_container_is_refused(tree: Any) -> None:
    with pytest.raises(Unwritable):
        tree_text(_tree.flatten(tree)[1])


@pytest.mark.parametrize(
    "said", [3, "dict", {}, {"list": [], "dict": []}, {"set": []}, {"dict": [[[1], None]]}], ids=str
)
def test_a_text_that_is_no_tree_is_refused(said: Any) -> None:
    with pytest.raises(ValueError):
        tree_of(said)
