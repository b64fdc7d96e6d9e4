"""Pointwise ops: every choice of their rule, on shards, against the op on global tensors."""

from __future__ import annotations

import pytest
import samples

from tests.support.stages.rule_proofs import FEW, GRIDS, LINES, prove


@pytest.mark.parametrize("name", list(samples.POINTWISE))
def test_every_choice_of_a_pointwise_op_is_right(name: str) -> None:
    for position in range(len(samples.POINTWISE[name])):
        prove(name, position, LINES[position % 2 : position % 2 + 1])
        prove(name, position, ((7,), GRIDS[position % 2]), most=FEW)
