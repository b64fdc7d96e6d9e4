"""Which kernels Inductor fuses, and their order."""

from __future__ import annotations

from typing import Any

import torch

from shardfn.compile.kernels import op_kinds
from shardfn.compile.kernels.fused import FARTHEST, Fusion, _Score, values_of
from shardfn.compile.kernels.stored import Stored
from tests.support.stages.graphs import graph_of

X = torch.ones(4, 6)


def fused(fn: Any, *args: torch.Tensor) -> list[list[str]]:
    order = Fusion(Stored(graph_of(fn, *args), {})).order
    return [[op_kinds.name(x) for x in values_of(group)] for group in order]


def test_readers_of_one_value_and_its_maker_are_one_kernel() -> None:
    found = fused(lambda x: [(y := torch.exp(x)) + 1, y * 2], X)
    assert found == [["exp", "add", "mul"]]


def test_a_row_sum_and_its_reader_are_one_kernel() -> None:
    found = fused(lambda x: [torch.exp(x) / x.sum(-1, keepdim=True)], X)
    assert found == [["sum", "div"]]


def test_a_sum_of_all_and_its_reader_are_two() -> None:
    assert fused(lambda x: [x / x.sum()], X) == [["sum"], ["div"]]


def test_nothing_is_fused_across_a_product() -> None:
    found = fused(lambda x: [(y := torch.exp(x)), torch.sin(y.t() @ y) @ y.t()], X)
    assert found == [["exp"], ["mm"], ["sin"], ["mm"]]


def test_loops_of_one_kind_are_fused_before_a_sum_is() -> None:
    both = lambda x: [(y := torch.exp(x)).sum(), y * 2]
    assert fused(both, X) == [["exp", "sum", "mul"]]


def products(x: torch.Tensor) -> torch.Tensor:
    """As many products, one after the other, as set loops far apart."""
    for _ in range(FARTHEST):
        x = x @ x
    return x


def test_a_loop_is_fused_with_its_maker_however_far_that_is() -> None:
    far = lambda x: [products((y := torch.exp(x)) @ x), y * 2]
    assert fused(far, torch.ones(4, 4))[0] == ["exp", "mul"]


def test_loops_that_read_the_same_are_fused_if_they_are_near() -> None:
    near = lambda x: [torch.relu(x) @ x, x * 2]
    assert fused(near, torch.ones(4, 4))[0] == ["relu", "mul"]
    far = lambda x: [products(torch.relu(x) @ x), x * 2]
    assert fused(far, torch.ones(4, 4))[0] == ["relu"]


def test_many_more_shared_bytes_come_before_loops_of_one_kind() -> None:
    alike, mixed = _Score(True, 100, 0), _Score(False, 1600, 0)
    assert mixed < alike
    assert alike < _Score(False, 1601, 0)
    assert alike < _Score(True, 101, -9)
