"""Trees of parameters beside their gradients and their paths."""

from __future__ import annotations

from collections import namedtuple

import torch

from shardfn.transforms.optimizers._trees import beside, described, dotted_paths

X, Y = torch.ones(2), torch.ones(3, 4)
Layer = namedtuple("Layer", "w b")


def test_paths_are_those_of_a_module() -> None:
    tree = {"layers": [Layer(X, Y), {"w": X}], "n": 3, "head": X}
    assert dotted_paths(tree) == ["layers.0.w", "layers.0.b", "layers.1.w", "head"]
    assert dotted_paths(X, "w") == ["w"] and dotted_paths(3) == []


def test_a_leaf_for_each_parameter_in_its_order() -> None:
    found, wrong = beside({"a": X, "n": 3, "b": Y}, {"b": 2, "a": 1, "n": 0}, ("g", "p"))
    assert (found, wrong) == ([1, 2], [])
    _, wrong = beside({"a": X}, {}, ("the gradients", "the parameters"))
    assert wrong == ["the whole tree: the gradients lack ['a']"]


def test_shapes_and_dtypes() -> None:
    assert described([X, None, Y.half()]) == [((2,), torch.float32), None, ((3, 4), torch.float16)]
