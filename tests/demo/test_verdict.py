"""What counts as the same numbers."""

import math

import pytest

from shardfn_demo.runs import Run
from shardfn_demo.verdict import differences, judge


def run(name, *losses):
    return Run(name, losses, 1.0, 0.1)


def test_differences_are_relative_and_one_for_each_step():
    assert differences(run("one", 4.0, 2.0), run("two", 5.0, 1.0)) == [0.25, 0.5]


def test_rounding_is_proof():
    verdict = judge([run("one", 4.0, 2.0), run("two", 4.0, 2.0 + 2e-6), run("three", 4.0, 2.0)])
    assert verdict.holds
    assert (
        verdict.sentence
        == "Proved: over 2 steps two and three have the loss of one to 1.0e-06 (limit 1e-04)."
    )


@pytest.mark.parametrize("last", [2.1, math.nan, math.inf])
def test_a_different_loss_is_no_proof(last):
    verdict = judge([run("one", 4.0, 2.0), run("two", 4.0, 2.0), run("three", 4.0, last)])
    assert not verdict.holds
    assert verdict.sentence.startswith(
        "Not proved: the loss is not that of one: three from step 2 on, by "
    )
    assert "two" not in verdict.sentence
