"""Cumulative ops: every choice of their rules is right on shards."""

from __future__ import annotations

from collections.abc import Callable

import pieces
import pytest
import torch

aten = torch.ops.aten
NAN, INF = float("nan"), float("inf")
ORDERED = (aten.cummax.default, aten.cummin.default)
# values along a dim of 7
EDGES: dict[str, torch.Tensor] = {
    "ties": torch.tensor([1.0, 2.0, 2.0, 1.0, 2.0, 1.0, 1.0]),
    "NaN": torch.tensor([1.0, 2.0, NAN, 3.0, NAN, 1.0, 0.0]),
    "infinite": torch.tensor([-INF, -INF, -INF, 0.0, INF, 1.0, INF]),
    "integers": torch.tensor([3, 1, 4, 1, 5, 5, 2]),
    "least": torch.tensor([torch.iinfo(torch.int64).min] * 7),
    "truths": torch.tensor([False, True, False, True, True, False, False]),
}


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("target", ORDERED, ids=str)
def test_extremes_of_chunks_have_the_indices_of_one_device(
    target: Callable[..., object], name: str
) -> None:
    op = pieces.OneOp(target, (EDGES[name], 0), {})
    for n in (2, 3, 5, 7, 9):
        op.prove([(0,)], [(0,), (0,)], (n,))


@pytest.mark.parametrize("name", ["infinite", "NaN"])
def test_sums_of_chunks_that_are_not_finite(name: str) -> None:
    for target in (aten.logcumsumexp.default, aten.cumsum.default):
        op = pieces.OneOp(target, (EDGES[name].double(), 0), {})
        for n in (2, 3, 9):
            op.prove([(0,)], [(0,)], (n,))


def test_half_precision_is_rounded_once() -> None:
    x = torch.full((300,), 1.25, dtype=torch.bfloat16)
    op = pieces.OneOp(aten.cumsum.default, (x, 0), {})
    for n in (2, 7):
        op.prove([(0,)], [(0,)], (n,))
