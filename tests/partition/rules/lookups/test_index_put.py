"""Writes by index: every choice of their rule is right on shards."""

from __future__ import annotations

import pieces
import torch

from shardfn.partition.rules.lookups import index_put


def test_a_sharded_dim_takes_the_values_of_negative_numbers_too() -> None:
    """7 rows on 3 ranks, the last of which has one."""
    x = torch.arange(14.0, dtype=torch.float64).view(7, 2)
    at = torch.tensor([-1, 0, 3, -7])
    op = pieces.OneOp(torch.ops.aten.index_put.default, (x, [at], x[:4] + 1, True), {})
    op.prove([(0,), ("R",), ("R",)], [(0,)], (3,))


def test_a_mask_whose_values_number_its_elements_is_only_read_whole() -> None:
    x, mask = torch.zeros(3, 2), torch.tensor([True, False, True])
    op = pieces.OneOp(torch.ops.aten.index_put.default, (x, [mask], torch.ones(2, 2)), {})
    assert index_put.index_put(op.call) == [(("R",) * 3, ("R",))]
