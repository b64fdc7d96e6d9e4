"""Arguments of another signature are named leaf by leaf."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf


def _of_params(params: Any, x: torch.Tensor) -> torch.Tensor:
    return x * params["w"]


ONES = torch.ones(2)
OTHER_TREES = {
    "another key": (
        ({"v": ONES}, ONES),
        ["params['w']: missing", "params['v']: the program has no such leaf"],
    ),
    "too few": (({"w": ONES},), ["x: missing"]),
    "too many": (({"w": ONES}, ONES, ONES), ["args[2]: the program has no such leaf"]),
    "another container": (
        ([ONES], ONES),
        ["params['w']: missing", "params[0]: the program has no such leaf"],
    ),
    "a tensor for a dict": (
        (ONES, ONES),
        ["params['w']: missing", "params: the program has no such leaf"],
    ),
}


@pytest.mark.parametrize("case", OTHER_TREES)
def test_another_tree_is_refused_leaf_by_leaf(case: str) -> None:
    args, wanted = OTHER_TREES[case]
    compiled = sf.jit(_of_params, backend="aten").compile({"w": ONES}, ONES)
    with pytest.raises(sf.TreeError, match="other arguments") as error:
        compiled(*args)
    lines = str(error.value).split("\n")[1:]
    assert [line.strip() for line in lines[: len(wanted)]] == wanted
    assert "PyTreeSpec" not in str(error.value)
