"""A compiled program runs its own signature, and refuses any other by what differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf

X = torch.arange(3.0)
COMPILED = sf.jit(lambda x, by: x * by, backend="aten").compile(X, 2)


def test_it_runs_with_other_values() -> None:
    assert COMPILED(X + 1, 2).tolist() == [2, 4, 6]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((X[:2], 2), "x"),
        ((X.double(), 2), "x"),
        ((X, 3), "by"),
        (([X], 2), "x: missing"),
    ],
    ids=["shape", "dtype", "constant", "tree"],
)
def test_another_signature_is_refused(args: tuple, text: str) -> None:
    with pytest.raises(sf.ShardError) as caught:
        COMPILED(*args)
    assert "jit(<lambda>)" in str(caught.value) and text in str(caught.value)


def test_a_tensor_without_values_cannot_run() -> None:
    with pytest.raises(sf.ShardError, match="meta"):
        COMPILED(torch.ones(3, device="meta"), 2)


def test_a_transform_of_torch_around_it_is_refused() -> None:
    with pytest.raises(sf.ShardError):
        torch.func.grad(lambda x: COMPILED(x, 2).sum())(X)


def test_results_are_memory_of_their_own() -> None:
    same = sf.jit(lambda x: (x, x), backend="aten").compile(X)
    first, second = same(X)
    assert len({x.data_ptr() for x in (X, first, second)}) == 3


def _of_params(params: Any, x: torch.Tensor) -> torch.Tensor:
    return x * params["w"]


ONES = torch.ones(2)
OTHER_TREES = {
    "another key": (
        ({"v": ONES}, ONES),
        ["params['w']: missing", "params['v']: the program has no such leaf"],
    ),
    "too few": (({"w": ONES},), ["x: missing"]),
    "too many": (
        ({"w": ONES}, ONES, ONES),
        ["args[2]: the program has no such leaf"],
    ),
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
