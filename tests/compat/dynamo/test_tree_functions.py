"""Functions of trees are marked, and Dynamo runs them as they are."""

from __future__ import annotations

import torch

import shardfn as sf
from shardfn._compat.dynamo.tree_functions import of_trees

X = torch.arange(3.0)
SEEN: list[str] = []


@of_trees
def doubled(tree, extra=None):
    SEEN.append(type(tree["a"]).__name__)
    return {"a": tree["a"], "n": tree["n"] * 2, "extra": [extra]}


def test_a_marked_function_runs_on_values_while_dynamo_reads() -> None:
    SEEN.clear()

    def fn(x: torch.Tensor) -> torch.Tensor:
        tree = doubled({"a": x, "n": 3}, extra=x + 1)
        return tree["a"] * tree["n"] + tree["extra"][0]

    wanted = X * 6 + X + 1
    assert torch.equal(sf.jit(fn, backend="aten")(X), wanted)
    assert SEEN == ["FakeTensor"], "Dynamo called it, once"
