"""Attention: every choice of their rules is right on shards."""

from __future__ import annotations

import pytest

from shardfn.partition.rules.attention import strategies
from tests.support.stages.rule_proofs import family, prove_on_grids, prove_on_lines


@pytest.mark.parametrize(("name", "position"), family(strategies))
def test_every_choice_is_right_on_one_axis(name: str, position: int) -> None:
    prove_on_lines(name, position)


@pytest.mark.parametrize(("name", "position"), family(strategies))
def test_choices_are_independent_on_two_axes(name: str, position: int) -> None:
    prove_on_grids(name, position)
