"""Means of means are named only where other weights make the loss of one device."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from shardfn.proof.audits.causes import Axis
from shardfn.proof.audits.observed import Loss
from shardfn.proof.audits.shards_of_ranks import LocalValue
from shardfn.proof.audits.weights import mean_of_means, written

AXES = (Axis("dp", ((0, 1),)),)


def loss(value: float, count: float | None) -> Loss:
    return Loss(LocalValue(torch.tensor(value, dtype=torch.float64)), count)


def found(alone: float, ranks: Sequence[tuple[float, float | None]], rows: int = 1) -> str | None:
    losses = [[loss(*each)] for each in ranks]
    return mean_of_means(losses, [[rows], [rows]], [loss(alone, None)], AXES)


def test_the_weights_that_make_the_loss_are_named() -> None:
    assert (
        found(1.75, [(1.0, 2.0), (2.0, 6.0)])
        == "a mean of means: the losses of the ranks of dp need the weights 1, 3"
    )


@pytest.mark.parametrize("alone", [1.5, 1.7501, 1.76, 3.0])
def test_other_losses_are_no_means(alone: float) -> None:
    assert found(alone, [(1.0, 2.0), (2.0, 6.0)]) is None


def test_equal_or_unknown_weights_are_none() -> None:
    assert found(1.75, [(1.0, 3.0), (2.0, 3.0)]) is None
    assert found(1.75, [(1.0, None), (2.0, 6.0)]) is None


def test_weights_are_written_small() -> None:
    assert written([30.0, 30.0, 20.0]) == "3, 3, 2" and written([0.5, 1.25]) == "0.5, 1.25"
