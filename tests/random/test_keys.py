"""Keys: two words of a seed, and streams that have nothing in common."""

from __future__ import annotations

import math

import numpy
import pytest
import torch

import shardfn as sf
from shardfn import random

KEY = random.key(20261122)


def test_streams_of_one_key_are_uncorrelated() -> None:
    keys = [
        *random.split(KEY, 3),
        random.fold_in(KEY, 0),
        random.fold_in(KEY, 1),
        random.fold_in(KEY, torch.tensor(2)),
        KEY,
    ]
    draws = torch.stack([random.normal(k, (100_000,), torch.float64) for k in keys])
    others = torch.corrcoef(draws) - torch.eye(len(keys), dtype=torch.float64)
    assert others.abs().max() < 5 / math.sqrt(100_000)


def test_a_seed_is_its_low_64_bits() -> None:
    assert random.key(7).tolist() == [7, 0]
    assert random.key(2**40 + 5).tolist() == [5, 2**8]
    assert random.key(-1).tolist() == [2**32 - 1, 2**32 - 1]
    assert torch.equal(random.key(2**64 + 3), random.key(3))


def test_numpys_integers_fold_in_as_pythons_do() -> None:
    base = random.key(3)
    assert torch.equal(random.fold_in(base, numpy.int64(7)), random.fold_in(base, 7))


@pytest.mark.parametrize("seed", [True, 1.5, None, "7"])
def test_a_seed_that_is_no_int_is_refused(seed: object) -> None:
    with pytest.raises(sf.ShardError) as caught:
        random.key(seed)  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"random.key: seed is {seed!r}\n")
    assert caught.value.arg_path == "seed"


def test_keys_are_words_and_all_of_a_split_differ() -> None:
    keys = random.split(KEY, (2, 3))
    assert keys.shape == (2, 3, 2) and keys.dtype == torch.int64
    assert keys.min() >= 0 and keys.max() < 2**32
    assert len({tuple(k) for k in keys.view(6, 2).tolist()}) == 6
    assert torch.equal(random.split(KEY, 6).view(2, 3, 2), keys), "by position alone"


def test_a_number_is_folded_in_whether_it_is_in_a_tensor_or_not() -> None:
    assert torch.equal(
        random.fold_in(KEY, 5), random.fold_in(KEY, torch.tensor(5, dtype=torch.int32))
    )
    folded = [tuple(random.fold_in(KEY, i).tolist()) for i in range(5)]
    assert len(set(folded)) == 5
