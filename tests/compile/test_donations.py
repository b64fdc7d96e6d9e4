"""Donated memory: which output is written into which donated input."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from shardfn.compile.donations import donations
from tests.support.stages.graphs import graph_of

X, Y = torch.ones(4, 4), torch.ones(4, 4)


def pairs(fn: Any, *args: torch.Tensor, donated: tuple[int, ...] = (0, 1)) -> Any:
    program: Any = SimpleNamespace(graph=graph_of(fn, *args))
    return donations(program, donated)


def test_each_donated_input_takes_one_output_of_its_layout() -> None:
    assert pairs(lambda x, y: [x + 1, y + 1, x + y], X, Y) == {0: 0, 1: 1}
    assert pairs(lambda x, y: [x + 1], X, Y, donated=(1,)) == {0: 1}


def test_an_output_of_another_shape_dtype_or_stride_does_not_fit() -> None:
    assert pairs(lambda x: [x.sum(0), (x + 1).double(), (x + 1).t()], X, donated=(0,)) == {}


def test_an_input_that_is_returned_is_not_written_over() -> None:
    assert pairs(lambda x, y: [x.t(), y + 1], X, Y, donated=(0,)) == {}
    assert pairs(lambda x, y: [x.t(), y + 1], X, Y) == {1: 1}


def test_two_outputs_in_one_memory_get_one_donated_input() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        z = x + y
        return [z, z]

    assert pairs(fn, X, Y) == {0: 0}
