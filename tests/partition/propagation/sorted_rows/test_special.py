"""Ops whose numbers are places of rows: on the rows of a rank they give its part of the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardfn.partition.propagation.sorted_rows.kinds import (
    Groups,
    Own,
)
from shardfn.partition.propagation.sorted_rows.proof import SortedRows, sorted_rows
from tests.support.stages.graphs import graph_of, op_of

X = torch.ones(4, 3)
IDS = torch.zeros(8, dtype=torch.int64)


def members(fn: Callable[..., Any]) -> SortedRows:
    (found,) = sorted_rows(graph_of(fn, X, IDS), "f").values()
    return found


def member(fn: Callable[..., Any], name: str) -> Any:
    """The last op of a name on sorted rows."""
    rows = members(fn).members.items()
    return [found for node, found in rows if op_of(node) == name][-1]


@pytest.mark.parametrize("dims", ["rows", "columns", "contracted"])
def test_a_product_by_groups_has_the_rows_in_one_of_its_dims(dims: str) -> None:
    def fn(x: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
        ids, perm = torch.sort(ids.clamp(min=0))
        counts = torch.histc(ids.double(), 2, 0, 1).to(torch.int32)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        rows = x.repeat(1, 3)[:, :8].bfloat16()[perm // 2]
        w = torch.ones(2, 8, 8, dtype=torch.bfloat16)
        a, b = {
            "rows": (rows, w),
            "columns": (w, rows.t()),
            "contracted": (rows.t(), rows),
        }[dims]
        return [torch.ops.aten._grouped_mm(a, b, ends).sum()]

    found = member(fn, "_grouped_mm")
    row = {"rows": Own(0), "columns": Own(1), "contracted": "sum"}[dims]
    assert found.outs == (row,)
    assert found.ins[2] == "sum"
    assert member(fn, "cumsum").kinds == (Groups(are_ends=True),)
    assert member(fn, "_to_copy").kinds[0] is not None
