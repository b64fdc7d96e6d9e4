"""The sources of a loader: a dataset by its indices, or any iterable of batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from . import samples
from .draws import Draws
from .samples import check_resumed

# Which of n rows a rank reads.
Share = Callable[[int], list[int]]
# Options of a DataLoader that do not say which samples make a batch.
OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "generator",
)


@attrs.frozen
class Batch:
    """One batch as read from the source.

    Args:
        tree: of tensors.
        sample: tells ranks and runs apart that read other batches.
        rows: of the global batch where the tree has only those of a rank; None where it has all.
        mine: the rows of the tree.
    """

    tree: Any
    sample: int
    rows: int | None = None
    mine: int | None = None


def is_indexed(data: Any) -> bool:
    """Return whether data is a DataLoader over a map-style dataset with batches of indices."""
    return (
        isinstance(data, DataLoader)
        and not isinstance(data.dataset, IterableDataset)
        and data.batch_sampler is not None
    )


def is_by_rows(data: Any) -> bool:
    """Return whether reading some rows of a batch gives those rows of the batch."""
    return is_indexed(data) and data.collate_fn is default_collate


class Shares:
    """A batch sampler that yields this rank's share of each batch's indices.

    Args:
        batches: the batch sampler of global batches.
        share: of a rank; None for all rows.
    """

    def __init__(self, batches: Iterable[Any], share: Share | None) -> None:
        self.batches, self.share = batches, share
        self.draws = Draws(0, 0)
        self.skip, self.sample, self.expected = 0, 0, 0
        # of each batch that is being read: its sample, and numbers of rows
        self.ahead: deque[tuple[int, int, int]] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        number = 0
        for indices in drawn(self.batches, self.draws):
            if number == self.skip:
                check_resumed(number, self.skip, self.sample, self.expected)
            self.sample = samples.of_indices(indices, self.sample)
            number += 1
            if number > self.skip:
                yield self._mine(list(indices))
        if number <= self.skip:
            check_resumed(number, self.skip, self.sample, self.expected)

    def _mine(self, indices: list[Any]) -> list[Any]:
        rows = range(len(indices)) if self.share is None else self.share(len(indices))
        self.ahead.append((self.sample, len(indices), len(rows)))
        # a rank without rows reads one, for the shapes and dtypes
        return [indices[i] for i in rows] or indices[:1]


class Indexed:
    """A map-style DataLoader of which a rank reads only its share.

    Args:
        data: the DataLoader of global batches.
        share: of a rank; None for all rows.
    """

    def __init__(self, data: DataLoader[Any], share: Share | None) -> None:
        self.shares = Shares(data.batch_sampler or (), share)
        options = {name: getattr(data, name) for name in OPTIONS}
        self.reader = DataLoader(data.dataset, batch_sampler=self.shares, **options)

    def read(self, draws: Draws, skip: int, sample: int) -> Iterator[Batch]:
        """The batches of a pass, after those that are skipped, which are not read."""
        shares = self.shares
        shares.draws, shares.skip = draws, skip
        shares.sample, shares.expected = 0, sample
        shares.ahead.clear()
        # torch draws the seed of workers, while the sampler may draw already
        with Draws(draws.seed, draws.epoch, "workers").used():
            feed = iter(self.reader)
        for tree in feed:
            sample, rows, mine = shares.ahead.popleft()
            if shares.share is None:
                yield Batch(tree, sample)
            else:
                yield Batch(tree, sample, rows, mine)


class Whole:
    """An iterable of global batches, all of which every rank reads.

    Args:
        data: the iterable.
    """

    def __init__(self, data: Iterable[Any]) -> None:
        self.data = data
        self.draws_too = isinstance(data, DataLoader)

    def read(self, draws: Draws, skip: int, sample: int) -> Iterator[Batch]:
        """The batches of a pass, after those that are skipped. With nothing to skip, the samples
        go on from the one that is given.
        """
        feed = self.data if not self.draws_too else drawn(self.data, draws)
        number = 0
        so_far = 0 if skip else sample
        for tree in feed:
            if number == skip and skip:
                check_resumed(number, skip, so_far, sample)
            so_far = samples.of_tree(tree, so_far)
            number += 1
            if number > skip:
                yield Batch(tree, so_far)
        if skip and number <= skip:
            check_resumed(number, skip, so_far, sample)


def drawn(data: Iterable[Any], draws: Draws) -> Iterator[Any]:
    """Iterate a source that draws from these generators."""
    end = object()
    with draws.used():
        feed = iter(data)
    while True:
        with draws.used():
            item = next(feed, end)
        if item is end:
            return
        yield item


def generators_of(data: Any) -> list[torch.Generator]:
    """List the generators that a DataLoader and its samplers own."""
    if not isinstance(data, DataLoader):
        return []
    batches = data.batch_sampler
    inner = getattr(batches, "sampler", None)
    owners = (data, data.sampler, batches, inner)
    own = [getattr(owner, "generator", None) for owner in owners]
    return list({id(g): g for g in own if isinstance(g, torch.Generator)}.values())


def set_epoch(data: Any, epoch: int) -> None:
    """Call set_epoch of the samplers and the dataset, if they have it."""
    batches = getattr(data, "batch_sampler", None)
    dataset = getattr(data, "dataset", None)
    inner = getattr(batches, "sampler", None)
    owners = {id(x): x for x in (data, batches, inner, dataset)}.values()
    for owner in owners:
        tell = getattr(owner, "set_epoch", None)
        if callable(tell):
            tell(epoch)
