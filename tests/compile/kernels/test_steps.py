"""What a compiled program holds at each of its kernels."""

from __future__ import annotations

from typing import Any

import torch

from shardfn.compile.kernels.steps import inductor_steps
from tests.support.stages.graphs import graph_of

X = torch.ones(10, 10)


def held(fn: Any, *args: torch.Tensor, taken: Any = None) -> list[int]:
    """How many matrices are held at each kernel, arguments among them."""
    steps = inductor_steps(graph_of(fn, *args), taken)
    return [len(nodes) for _, nodes in steps]


def test_a_loop_writes_over_what_it_reads_last() -> None:
    assert held(lambda x: [torch.sin(x @ x) @ x], X) == [2, 2, 3]


def test_it_does_not_while_something_else_reads_that() -> None:
    assert held(lambda x: [torch.sin(y := x @ x) @ y], X) == [2, 3, 4]


def test_a_value_that_one_kernel_makes_and_reads_is_not_stored() -> None:
    assert held(lambda x: [(y := torch.exp(x)) + 1, (y * 2) @ x], X) == [3, 4]


def test_results_lie_in_donated_arguments() -> None:
    assert held(lambda x, g: [x - g.sin()], X, X, taken={0: 0}) == [2]
