"""`check` says with which weights a mean of means is taken."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import shardfn as sf
from shardfn import P
from shardfn.transforms.proofs._means import written

F64 = torch.float64
X = torch.arange(12.0, dtype=F64).view(6, 2)
W = torch.ones(2, dtype=F64)
MASK = torch.tensor([1, 1, 1, 0, 1, 1], dtype=F64)  # 2, 1 and 2 of the rows of three ranks
Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def loss(w: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return ((x @ w) ** 2 * mask).sum() / mask.sum()


def per_rank(fn: Step) -> Step:
    """A loss of each rank's rows, and the mean of the ranks."""
    return sf.shard_map(
        lambda w, x, mask: sf.pmean(fn(w, x, mask), "dp"),
        in_placements=(P(), P("dp"), P("dp")),
        out_placements=P(),
    )


def failure(fn: Step, mask: torch.Tensor = MASK) -> str:
    with pytest.raises(sf.DivergenceError) as error:
        sf.check(fn, W, X, mask, worlds=[3], placements=(P(), P("dp"), P("dp")))
    return str(error.value)


def test_a_mean_of_means_is_said_with_its_weights() -> None:
    text = failure(sf.value_and_grad(per_rank(loss)))
    assert (
        "it is a mean of means: weights 2, 1, 2 over dp, but the function on one device"
    ) in text


def test_a_number_alone_does_not_tell_weights_of_three() -> None:
    assert "it is a mean of means over dp, but the function on one device" in failure(
        per_rank(loss)
    )


def test_equal_parts_are_right_and_other_faults_are_no_means() -> None:
    equal = torch.ones(6, dtype=F64)
    specs = P(), P("dp"), P("dp")
    assert sf.check(per_rank(loss), W, X, equal, worlds=[3], placements=specs)[3] < 1e-12
    summed: Step = sf.shard_map(
        lambda w, x, mask: sf.psum(loss(w, x, mask), "dp"), in_placements=specs, out_placements=P()
    )
    assert "mean of means" not in failure(summed, equal)


def test_weights_are_small_numbers_where_they_are_such() -> None:
    assert written([3 / 8, 3 / 8, 2 / 8]) == "3, 3, 2"
    assert written([0.123456, 0.876544]) == "0.1235, 0.8765"
