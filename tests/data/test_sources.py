"""What is read: shares of indices, skipped batches, generators, epochs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

import shardfn as sf
from shardfn.data import sources
from shardfn.data.draws import Draws

ROWS: Any = [torch.tensor(i) for i in range(7)]


def read(source: Any, skip: int = 0, sample: int = 0) -> list[Any]:
    return [
        (batch.tree.tolist(), batch.rows, batch.mine)
        for batch in source.read(Draws(0, 0), skip, sample)
    ]


def test_a_share_of_each_batch_and_one_row_where_there_is_none() -> None:
    data = DataLoader(ROWS, batch_size=3)
    source = sources.Indexed(data, lambda n: list(range(n))[1:2])
    assert read(source) == [([1], 3, 1), ([4], 3, 1), ([6], 1, 0)]
    assert read(sources.Indexed(data, None))[-1] == ([6], None, None)


@pytest.mark.parametrize("skip", [0, 1, 3])
def test_skipped_batches_are_not_read_of_indices(skip: int) -> None:
    fetched: list[int] = []

    class Rows:
        def __getitem__(self, i: int) -> int:
            fetched.append(i)
            return i

        def __len__(self) -> int:
            return 7

    data: Any = DataLoader(Rows(), batch_size=3)  # type: ignore[arg-type]
    every = [*sources.Indexed(data, None).read(Draws(0, 0), 0, 0)]
    fetched.clear()
    sample = every[skip - 1].sample if skip else 0
    left = read(sources.Indexed(data, None), skip, sample)
    assert [rows for rows, _, _ in left] == [b.tree.tolist() for b in every[skip:]]
    assert fetched == list(range(7))[3 * skip :]


@pytest.mark.parametrize("make", [lambda x: x, iter])
def test_a_resumed_run_on_other_batches_is_refused(make: Any) -> None:
    plain = [torch.tensor([i]) for i in range(3)]
    for source in (
        sources.Whole(make(plain)),
        sources.Indexed(DataLoader(ROWS, batch_size=3), None),
    ):
        with pytest.raises(sf.CheckpointError, match="the first 2 batches"):
            read(source, 2, 123)
    with pytest.raises(sf.CheckpointError, match="have 3 batches"):
        read(sources.Indexed(DataLoader(ROWS, batch_size=3), None), 4, 123)


def test_what_is_read_by_rows() -> None:
    assert sources.is_by_rows(DataLoader(ROWS, batch_size=2))
    custom = DataLoader(ROWS, batch_size=2, collate_fn=torch.stack)
    assert sources.is_indexed(custom) and not sources.is_by_rows(custom)
    assert not sources.is_indexed(DataLoader(ROWS, batch_size=None))
    assert not sources.is_indexed(ROWS)


def test_generators_and_epochs() -> None:
    class Sampler(SequentialSampler):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    generator = torch.Generator()
    data = DataLoader(ROWS, batch_size=2, shuffle=True, generator=generator)
    assert sources.generators_of(data) == [generator]
    assert sources.generators_of(ROWS) == []
    sampler = Sampler(ROWS)
    batches = BatchSampler(sampler, 2, drop_last=False)
    sources.set_epoch(DataLoader(ROWS, batch_sampler=batches), 4)
    assert sampler.epoch == 4
