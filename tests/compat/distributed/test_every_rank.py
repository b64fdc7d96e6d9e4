"""Code of DTensor run for all ranks at once, in one process."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

import shardfn as sf
from shardfn._compat.distributed.every_rank import (
    all_ranks,
    constructor_replaced,
    one_thread,
    per_rank,
    runs_on_all_ranks,
    values_per_rank,
)


def test_an_op_runs_on_the_tensor_of_each_rank() -> None:
    with sf.fake_world(2), all_ranks([0, 1]):
        assert runs_on_all_ranks()
        x = per_rank({0: torch.ones(2), 1: torch.zeros(2)}) + 1
        found = values_per_rank(x)
    assert found is not None and not runs_on_all_ranks()
    assert {rank: y.tolist() for rank, y in found.items()} == {0: [2, 2], 1: [1, 1]}
    assert values_per_rank(torch.ones(1)) is None


def test_the_constructor_is_replaced_and_comes_back() -> None:
    construct = DTensor.__new__
    with constructor_replaced(lambda torchs, *args: (torchs is construct, args)):
        assert DTensor.__new__(DTensor, 1, 2) == (True, (DTensor, 1, 2))
    assert DTensor.__new__ is construct


def test_the_lock_is_re_entrant() -> None:
    with one_thread(), one_thread():
        pass
