"""permutation, choice and dropout: what they keep of the array."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from shardfn import random

KEY = random.key(5)
X = torch.arange(12.0).view(3, 4)


def test_a_permutation_has_every_row_once() -> None:
    rows = random.permutation(KEY, X)
    assert sorted(rows[:, 0].tolist()) == [0.0, 4.0, 8.0]
    columns = random.permutation(KEY, X, axis=1)
    assert torch.equal(columns.sort(1).values, X)
    assert torch.equal(columns - columns[:1], (X - X[:1])[:, :1].expand(3, 4)), "alike"
    assert random.permutation(KEY, 7).sort().values.tolist() == list(range(7))


def test_each_row_may_have_an_order_of_its_own() -> None:
    many = torch.arange(20.0).expand(30, 20)
    rows = random.permutation(KEY, many, axis=1, independent=True)
    assert torch.equal(rows.sort(1).values, many)
    assert len({tuple(row.tolist()) for row in rows}) == 30


def test_a_choice_without_replacement_has_no_element_twice() -> None:
    for p in (None, torch.full((9,), 1 / 9)):
        chosen = random.choice(KEY, 9, (3, 3), replace=False, p=p)
        assert sorted(chosen.flatten().tolist()) == list(range(9))


def test_an_element_of_probability_zero_is_never_chosen() -> None:
    p = torch.tensor([0.0, 0.5, 0.0, 0.5])
    chosen = random.choice(KEY, 4, (1000,), p=p)
    assert set(chosen.tolist()) == {1, 3}


def test_the_shape_stands_in_the_place_of_the_axis() -> None:
    assert random.choice(KEY, X, (2, 5), axis=1).shape == (3, 2, 5)
    assert random.choice(KEY, X, (), axis=0).shape == (4,)
    assert random.choice(KEY, X, 2, axis=-1).shape == (3, 2)


def test_dropout_keeps_the_mean_of_what_stays() -> None:
    x = torch.ones(10_000)
    dropped = random.dropout(KEY, x, 0.25)
    assert dropped.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert abs(float(dropped.mean()) - 1) < 0.05
    assert torch.equal(random.dropout(KEY, X, 0.0), X)
    assert not random.dropout(KEY, X, 1.0).any()


def test_a_rate_that_is_no_probability_is_refused() -> None:
    for rate in (-0.1, 1.1, "half"):
        with pytest.raises(sf.ShardError, match="random.dropout"):
            random.dropout(KEY, X, rate)  # type: ignore[arg-type]
