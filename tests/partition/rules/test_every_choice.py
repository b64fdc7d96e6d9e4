"""Every choice of every sharding rule in a table: run on shards, and compared with the plain op."""

from __future__ import annotations

import pytest
import samples

from tests.support.stages.rule_proofs import FEW, GRIDS, LINES, PAIRS, prove

CASES = [
    pytest.param(name, k, id=f"{name.removeprefix('aten.')}-{k}")
    for name, calls in samples.IN_TABLES.items()
    for k in range(len(calls))
]


@pytest.mark.parametrize(("name", "position"), CASES)
def test_every_choice_is_right_on_one_axis(name: str, position: int) -> None:
    prove(name, position, LINES)


@pytest.mark.parametrize(("name", "position"), CASES)
def test_choices_are_independent_on_two_axes(name: str, position: int) -> None:
    prove(name, position, GRIDS, most=PAIRS)


@pytest.mark.parametrize("name", list(samples.POINTWISE))
def test_every_choice_of_a_pointwise_op_is_right(name: str) -> None:
    for position in range(len(samples.POINTWISE[name])):
        prove(name, position, LINES[position % 2 : position % 2 + 1])
        prove(name, position, ((7,), GRIDS[position % 2]), most=FEW)
