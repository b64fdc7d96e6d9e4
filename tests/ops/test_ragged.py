"""ragged_all_to_all, the op: rows to other ranks by counts, checked before any is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

import shardfn as sf
from shardfn.ops.ragged import check_counts, checked_counts, ragged_all_to_all, rows_of_each

COUNTS = torch.tensor([[1, 2, 0], [0, 3, 1], [2, 0, 0]])
VALUES = [torch.arange(10.0).view(5, 2) + 100 * (rank + 1) for rank in range(3)]


def by_hand(values: list[Tensor], counts: Tensor, rows: int) -> list[Tensor]:
    """What each rank receives, row by row."""
    results = []
    for target in range(len(values)):
        out = torch.zeros(rows, *values[0].shape[1:], dtype=values[0].dtype)
        place = 0
        for x, sizes in zip(values, counts.tolist(), strict=True):
            start = sum(sizes[:target])
            for row in x[start : start + sizes[target]]:
                out[place] = row
                place += 1
        results.append(out)
    return results


def test_rows_come_in_the_order_of_their_senders_and_zeros_after_them() -> None:
    got = rows_of_each(VALUES, COUNTS, 6)
    assert all(map(torch.equal, got, by_hand(VALUES, COUNTS, 6)))
    assert got[1][:, 0].tolist() == [102, 104, 200, 202, 204, 0]


def test_each_element_of_a_batch_has_counts_of_its_own() -> None:
    counts = torch.stack([COUNTS, COUNTS.T.contiguous()])
    values = [torch.stack([x, -x]) for x in VALUES]
    got = rows_of_each(values, counts, 7)
    first, second = by_hand(VALUES, counts[0], 7), by_hand([-x for x in VALUES], counts[1], 7)
    assert all(
        torch.equal(x, torch.stack(pair)) for x, *pair in zip(got, first, second, strict=True)
    )


def on_rank(values: list[Tensor], counts: Tensor, rows: int) -> Any:
    group = torch.distributed.group.WORLD
    assert group is not None
    x = values[group.rank()]
    try:
        out = ragged_all_to_all(x, counts, rows, group.group_name)
        return torch.ops._c10d_functional.wait_tensor(out)
    except sf.ShardError as error:
        return type(error).__name__, str(error)


def both(values: list[Tensor], counts: Tensor, rows: int) -> Any:
    alone = on_rank(values, counts, rows)
    batch = [torch.stack([x, x + 1]) for x in values]
    return alone, on_rank(batch, torch.stack([counts, counts.T.contiguous()]), rows)


def test_gloo_sends_the_rows_that_the_simulator_sends() -> None:
    batch = [torch.stack([x, x + 1]) for x in VALUES]
    alone = rows_of_each(VALUES, COUNTS, 6)
    batched = rows_of_each(batch, torch.stack([COUNTS, COUNTS.T.contiguous()]), 6)
    for rank, (got, got_batched) in enumerate(run_ranks(3, both, VALUES, COUNTS, 6)):
        assert torch.equal(got, alone[rank])
        assert torch.equal(got_batched, batched[rank])


def test_all_ranks_of_gloo_refuse_the_same_rows() -> None:
    (first, *others) = run_ranks(3, on_rank, VALUES, COUNTS, 4)
    assert first[0] == "CapacityError"
    assert others == [first, first]


def test_a_rank_that_receives_too_many_rows_is_named_with_its_bound() -> None:
    with pytest.raises(sf.CapacityError) as caught:
        check_counts(COUNTS, 5, 4)
    assert str(caught.value) == (
        "ragged_all_to_all, rows: rank 1 of the axis receives 5 rows, but has room for 4\n  "
        "needed: a bound of 5 or more\n  try: rows=5; or rows=None to make room for the "
        "largest possible number"
    )
    error = caught.value
    assert (error.rank, error.received, error.bound) == (1, 5, 4)
    check_counts(COUNTS, 5, 5)


def test_a_negative_count_is_refused_with_sender_and_receiver() -> None:
    with pytest.raises(sf.ShardError, match="rank 2 of the axis sends -1 rows to rank 0"):
        check_counts(torch.tensor([[1, 0, 0], [0, 0, 1], [-1, 0, 0]]), 5, 9)


def test_a_rank_that_sends_more_rows_than_it_has_is_refused() -> None:
    with pytest.raises(sf.ShardError, match="rank 1 of the axis sends 4 rows, but has 3"):
        check_counts(COUNTS, 3, 9)


def test_checked_counts_are_the_counts_under_vmap_too() -> None:
    counts = torch.stack([COUNTS, COUNTS.T], 2)
    got = torch.func.vmap(lambda c: checked_counts(c, 5, 6), 2, 2)(counts)
    assert torch.equal(got, counts)
    with pytest.raises(sf.CapacityError, match="receives 5 rows, but has room for 4"):
        torch.func.vmap(lambda c: checked_counts(c, 5, 4), 2)(counts)


def test_no_rows_are_no_rows() -> None:
    nothing = [torch.zeros(0, 2) for _ in range(3)]
    got = rows_of_each(nothing, torch.zeros(3, 3, dtype=torch.int64), 2)
    assert all(torch.equal(x, torch.zeros(2, 2)) for x in got)
