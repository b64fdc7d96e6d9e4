"""Merges and splits of dims: every choice of their rule is right on shards."""

from __future__ import annotations

import pieces
import torch

from shardfn.partition.rules import reshape


def test_merged_dims_share_the_factor_that_they_have_in_common() -> None:
    op = pieces.OneOp(torch.ops.aten.view.default, (torch.ones(3, 5, 2), [15, 2]), {})
    choices = reshape.reshape(op.call)
    assert ((0,), ((0, 5),)) in choices
    assert ((1,), ((0, 1, 3),)) in choices
    assert ((2,), (1,)) in choices
    assert len(choices) == 5, "these, and all replicated or Partial"


def test_dims_that_share_no_factor_are_one_run_on_one_rank() -> None:
    view = torch.ops.aten.view.default
    op = pieces.OneOp(view, (torch.ones(3, 5), [5, 3]), {})
    assert reshape.reshape(op.call) == [
        (("R",), ("R",)),
        (("sum",), ("sum",)),
        (((0, 3),), ((0, 5),)),
    ]
