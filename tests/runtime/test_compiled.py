"""A compiled program runs its own signature, and refuses any other by what differs."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf

X = torch.arange(3.0)
COMPILED = sf.jit(lambda x, by: x * by, backend="aten").compile(X, 2)


def test_it_runs_with_other_values() -> None:
    assert COMPILED(X + 1, 2).tolist() == [2, 4, 6]


@pytest.mark.parametrize(
    ("args", "text"),
    [((X[:2], 2), "x"), ((X.double(), 2), "x"), ((X, 3), "by"), (([X], 2), "x: missing")],
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


def test_it_states_the_memory_of_its_program() -> None:
    fn = sf.jit(lambda w, x: torch.tanh(x @ w) @ w, donate_argnums=(1,), backend="aten")
    args = torch.ones(3, 3), torch.ones(5, 3)
    assert fn.compile(*args).memory == fn.lower(*args).memory
