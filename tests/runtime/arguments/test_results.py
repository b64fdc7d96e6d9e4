"""The results of a call: in the tree that the function returns, with its constants."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shardfn import _tree
from shardfn.runtime.arguments.results import in_tree, maker
from shardfn.types import TENSOR


def captured(tree: Any) -> Any:
    leaves, treedef = _tree.flatten(tree)
    program = SimpleNamespace(out_tree=treedef, out_leaves=tuple(leaves))
    return SimpleNamespace(program=program)


def test_tensors_fill_the_places_between_constants() -> None:
    put = in_tree(captured({"a": TENSOR, "n": 3, "b": [TENSOR, None]}))
    assert put(["x", "y"]) == {"a": "x", "n": 3, "b": ["y", None]}
    assert in_tree(captured((TENSOR, TENSOR)))(["x", "y"]) == ("x", "y")
    assert in_tree(captured(5))([]) == 5


def test_without_a_mesh_local_results_are_the_results() -> None:
    placed: Any = SimpleNamespace(mesh=None)
    assert maker(placed, captured(TENSOR), None) is None  # type: ignore[arg-type]
