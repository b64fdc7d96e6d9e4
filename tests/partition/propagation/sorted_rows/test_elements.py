"""Facts about elements that a program says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardfn.partition.propagation.sorted_rows.elements import is_at_least, is_constant_along
from tests.support.stages.graphs import graph_of

X = torch.ones(6, 4)
IDS = torch.zeros(6, dtype=torch.int64)


def result(fn: Callable[..., Any], *args: torch.Tensor) -> torch.fx.Node:
    (output,) = graph_of(fn, *args).find_nodes(op="output")
    (node,) = output.all_input_nodes
    return node


@pytest.mark.parametrize(
    ("fn", "is_constant"),
    [
        (lambda x: torch.zeros(6, 4), True),
        (lambda x: x.sum(0).expand(6, 4), True),
        (lambda x: x.sum().expand(6, 4), True),
        (lambda x: x.sum(0, keepdim=True), True),
        (lambda x: x.sum(0).expand(6, 4).sin() + torch.ones(6, 1), True),
        (lambda x: torch.ops.aten.copy(x, torch.ones(6, 4)), True),
        (lambda x: x.sin(), False),
        (lambda x: x.sum(1, keepdim=True).expand(6, 4), False),
        (lambda x: x.sum(0).expand(6, 4) + x, False),
        (lambda x: torch.ops.aten.copy(torch.ones(6, 4), x), False),
    ],
)
def test_rows_are_the_same_where_the_program_says_so(
    fn: Callable[..., Any], is_constant: bool
) -> None:
    assert is_constant_along(result(fn, X), 0) == is_constant


@pytest.mark.parametrize(
    ("fn", "is_enough"),
    [
        (lambda x, ids: x.topk(2)[1].view(-1), True),
        (lambda x, ids: x.argmax(0).long() + 0 * ids[:4], False),
        (lambda x, ids: x.argmax(0).float(), True),
        (lambda x, ids: x.max(0)[1], True),
        (lambda x, ids: x.sort(1)[1][:, 0], True),
        (lambda x, ids: ids.clamp(min=0), True),
        (lambda x, ids: ids.to(torch.uint8), True),
        (lambda x, ids: ids, False),
        (lambda x, ids: ids.clamp(min=-1), False),
        (lambda x, ids: ids.clamp(max=3), False),
        (lambda x, ids: x.topk(2)[0].view(-1), False),
        (lambda x, ids: x.topk(2)[1].to(torch.int8), False),
    ],
)
def test_places_are_no_less_than_zero(fn: Callable[..., Any], is_enough: bool) -> None:
    assert is_at_least(result(fn, X, IDS), 0) == is_enough
    assert not is_at_least(result(fn, X, IDS), 1)
