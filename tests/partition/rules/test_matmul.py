"""Matrix products: every choice of their rules is right on shards."""

from __future__ import annotations

import pieces
import pytest
import torch
from sample_values import f

from tests.support.stages.rule_proofs import LINES, plain_ways


def test_every_choice_of_the_products_of_hugging_face_is_right() -> None:
    pytest.importorskip("transformers.integrations.moe")
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    x, w, g = f(5, 3), f(3, 3, 4), f(5, 4)
    ops = torch.ops.transformers
    for op, given in (
        (ops.grouped_mm_fallback.default, (x, w, ends)),
        (ops.grouped_mm_fallback_backward.default, (x, w, ends, g)),
    ):
        one = pieces.OneOp(op, given, {})
        for sizes in LINES:
            ways = list(plain_ways(one, sizes))
            assert len(ways) > 3
            for ins, outs in ways:
                one.prove(ins, outs, sizes)
