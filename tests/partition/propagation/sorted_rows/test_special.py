"""Ops whose numbers are places of rows: on the rows of a rank they give its part of the result."""

from __future__ import annotations

import pytest
import torch

from shardfn.partition.propagation.sorted_rows.kinds import Groups, Own
from tests.support.stages.sorted_rows import member


@pytest.mark.parametrize("dims", ["rows", "columns", "contracted"])
def test_a_product_by_groups_has_the_rows_in_one_of_its_dims(dims: str) -> None:
    def fn(x: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
        ids, perm = torch.sort(ids.clamp(min=0))
        counts = torch.histc(ids.double(), 2, 0, 1).to(torch.int32)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        rows = x.repeat(1, 3)[:, :8].bfloat16()[perm // 2]
        w = torch.ones(2, 8, 8, dtype=torch.bfloat16)
        a, b = {"rows": (rows, w), "columns": (w, rows.t()), "contracted": (rows.t(), rows)}[dims]
        return [torch.ops.aten._grouped_mm(a, b, ends).sum()]

    found = member(fn, "_grouped_mm")
    row = {"rows": Own(0), "columns": Own(1), "contracted": "sum"}[dims]
    assert found.outs == (row,)
    assert found.ins[2] == "sum"
    assert member(fn, "cumsum").kinds == (Groups(are_ends=True),)
    assert member(fn, "_to_copy").kinds[0] is not None
