"""Memory that is free, and kept for a later result of the same size."""

from __future__ import annotations

from typing import Any

import torch

from shardfn.compile.kernels.steps import inductor_steps
from tests.support.stages.graphs import graph_of

X = torch.ones(10, 10)
B = torch.ones(10, 9)
W = torch.ones(10, 30)


def held(fn: Any, *args: torch.Tensor) -> list[int]:
    """How many numbers each kernel holds beside the arguments."""
    inputs = sum(x.numel() for x in args)
    steps = inductor_steps(graph_of(fn, *args))
    return [sum(x.meta["val"].numel() for x in nodes) - inputs for _, nodes in steps]


def between(x: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    """The first product is free while the third is made, and of the size of the last."""
    first = x @ x
    second = first @ b
    return [second.T @ second, x @ x.T]


def test_memory_is_not_kept_where_that_would_raise_the_peak() -> None:
    assert held(between, X, B) == [100, 190, 90 + 81, 81 + 100]


def test_memory_is_kept_below_the_peak() -> None:
    def fn(x: torch.Tensor, b: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        square = w.T @ w
        return [square.sum(), *between(x, b)]

    small = [1 + 100, 1 + 190, 1 + 90 + 81 + 100, 1 + 81 + 100]
    assert held(fn, X, B, W) == [900, 901, *small]
