"""`loader`: batches of an iterable as DTensors, of which each rank reads its rows."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ... import _compat
from ...accepted import accept
from ...errors import DivergenceError
from ...mesh import check_mesh, refuse_unusable_mesh
from . import checks, placing
from .agreement import BATCH, END, FAILED, ranks_that_compare
from .draws import Draws
from .sources import Batch, Indexed, Whole, generators_of, is_by_rows, is_indexed, set_epoch


class Loader:
    """An iterable of batches, in which every tensor is a DTensor. Each `for` loop over the loader
    is one epoch.

    Args:
        data: the global batches.
        mesh: a DeviceMesh.
        placements: a prefix tree of placements over a batch.
        seed: the seed for samplers of `data` without a generator of their own.
        rows: the placement of the batch dim if each rank reads only the rows of its shards, or None
            if each rank reads all rows.

    Example:
        >>> import torch, shardfn as sf
        >>> with sf.fake_world(2):
        ...     mesh = sf.make_mesh((2,), ("dp",))
        ...     batches = sf.loader([torch.ones(6, 3)] * 2, mesh, sf.P("dp"))
        ...     print(len(batches), [tuple(x.to_local().shape) for x in batches])
        2 [(3, 3), (3, 3)]
    """

    def __init__(self, data: Any, mesh: Any, placements: Any, seed: int, rows: Any) -> None:
        self.data, self.mesh, self.placements = data, mesh, placements
        self.seed = seed
        self.ranks = ranks_that_compare(mesh)
        share = None
        if rows is not None and self.ranks is not None:
            share = functools.partial(placing.share_of, spec=rows, mesh=mesh)
        self.source = Indexed(data, share) if is_indexed(data) else Whole(data)
        self.generators = generators_of(data)
        self.epoch, self.number, self.sample = 0, 0, 0
        self.loaded: dict[str, Any] | None = None
        self.starts = [g.get_state() for g in self.generators]

    def __len__(self) -> int:
        """The number of batches of a pass."""
        return len(self.data)

    def __iter__(self) -> Iterator[Any]:
        """The batches of one pass; after `load_state_dict` those that are left of it.

        Raises:
            DivergenceError: ranks that read other batches, or another number of them.
            CheckpointError: data other than those of the state that was loaded.
            PlacementError: placements that do not fit a batch.
        """
        feed = self._begin()
        while True:
            batch, tree = self._next(feed)
            if batch is None:
                break
            self.number += 1
            self.sample = batch.sample
            yield tree
        self.epoch, self.number, self.sample = self.epoch + 1, 0, 0

    def _begin(self) -> Iterator[Batch]:
        """Start a pass over the data, or continue one from a loaded state."""
        state, self.loaded = self.loaded, None
        if state is None and self.number:  # a pass that was left
            self.epoch, self.number, self.sample = self.epoch + 1, 0, 0
        if state is None:
            self.starts = [g.get_state() for g in self.generators]
        else:
            self.starts = state["generators"]
        for generator, start in zip(self.generators, self.starts, strict=True):
            generator.set_state(start)
        set_epoch(self.data, self.epoch)
        draws = Draws(self.seed, self.epoch)
        skip = self.number
        if state is not None and state["data"] is not None:
            self.data.load_state_dict(state["data"])
            skip = 0
        return self.source.read(draws, skip, self.sample)

    def _next(self, feed: Iterator[Batch]) -> tuple[Batch | None, Any]:
        """Read the next batch, and place it as DTensors; (None, None) at the end."""
        batch, tree, text, error = None, None, "", None
        try:
            batch = next(feed, None)
            if batch is not None:
                tree = placing.placed(batch, self.mesh, self.placements)
                text = placing.shapes_of(batch)
        except Exception as caught:  # the other ranks have to hear of it
            error = caught
        if self.ranks is not None:
            status = END if batch is None else BATCH
            sample = 0 if batch is None else batch.sample
            if error is not None:
                status, text = FAILED, f"{type(error).__name__}: {error}"
            try:
                self.ranks.agree(self.number, status, sample, text)
            except DivergenceError:
                if error is None:
                    raise
        if error is not None:
            raise error
        return batch, tree

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader in its data, to be saved with `sf.save` or
        `torch.save`. A loader on any number of ranks can load the state.

        Returns:
            A dict of numbers, the states of random generators, and the state of `data` if `data`
            has a `state_dict`.

        Example:
            >>> import torch, shardfn as sf
            >>> batches = [torch.full((2,), float(i)) for i in range(3)]
            >>> with sf.fake_world(2):
            ...     loader = sf.loader(batches, sf.make_mesh((2,), ("dp",)), sf.P("dp"))
            ...     first = next(iter(loader))
            ...     state = loader.state_dict()
            ...     loader.load_state_dict(state)
            ...     [sf.full(x) for x in loader]
            [tensor([1., 1.]), tensor([2., 2.])]
        """
        starts = self.starts
        if self.number == 0 and self.loaded is None:
            starts = [g.get_state() for g in self.generators]
        data = None
        if self.loaded is not None:
            data = self.loaded["data"]
        elif self.is_stateful and self.number:
            data = self.data.state_dict()
        return {
            "epoch": self.epoch,
            "batch": self.number,
            "sample": self.sample,
            "seed": self.seed,
            "generators": list(starts),
            "data": data,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the saved state of a loader, on the same or another number of ranks. The
        next `for` loop over the loader returns the remaining batches of the epoch in which the
        state was saved.

        Args:
            state: the state that `state_dict` of a loader of the same data returned.

        Raises:
            CheckpointError: the state was not saved by a loader of the same data.

        Example:
            >>> import torch, shardfn as sf
            >>> with sf.fake_world(2):
            ...     loader = sf.loader([], sf.make_mesh((2,), ("dp",)), sf.P("dp"))
            ...     loader.load_state_dict(loader.state_dict())
        """
        checks.check_state(state, len(self.generators), self.is_stateful)
        self.epoch, self.number = state["epoch"], state["batch"]
        self.sample, self.seed = state["sample"], state["seed"]
        self.starts = list(state["generators"])
        self.loaded = dict(state)

    @property
    def is_stateful(self) -> bool:
        """Whether the data source has a method `state_dict`."""
        has_state = hasattr(self.data, "state_dict")
        can_load = hasattr(self.data, "load_state_dict")
        return has_state and can_load and not is_indexed(self.data)


@_compat.outside_only
def loader(
    data: Iterable[Any], mesh: Any, placements: Any, *, seed: int = 0, rows: bool | None = None
) -> Loader:
    """Turn the batches of a `DataLoader` into DTensors.

    `data` must yield global batches, which are the same on every rank and for every number of
    ranks. By default, if `data` is a DataLoader over an indexable dataset, and uses torch's own
    collate function, each rank reads only the rows of its shards. If `data` is an iterable without
    indices, or a DataLoader with a collate function other than torch's own, each rank by default
    reads whole batches, and keeps the rows of its shards. For every batch, the ranks check that
    they read the same data.

    Args:
        data: an iterable of trees of tensors, such as a torch DataLoader, in which every batch is
            the global batch.
        mesh: a DeviceMesh. Shards are moved to the device of the mesh.
        placements: a prefix tree of placements over a batch, such as `P("dp")`.
        seed: the seed for samplers of a DataLoader without a generator of their own. The seed and
            the number of the epoch determine the order of samples.
        rows: whether each rank reads only the rows of its shards. With `rows=True`, the collate
            function of the DataLoader must handle each row separately. By default, `rows` is True
            if the collate function is torch's own.

    Returns:
        An iterable of batches with DTensors. The methods `state_dict` and `load_state_dict` of the
        iterable save its position, and continue from a saved position on any number of ranks. Each
        `for` loop over the iterable is one epoch.

    Raises:
        ShardError: data is not iterable, or is sharded by a DistributedSampler.
        PlacementError: the placements do not fit the mesh, or `rows=True` is given although the
            data or the placements have no rows to split.

    Source: torch.utils.data.DataLoader; jax.make_array_from_process_local_data;
        torchdata.stateful_dataloader.

    Example:
        >>> import torch, shardfn as sf
        >>> from torch.utils.data import DataLoader
        >>> data = DataLoader(torch.arange(5.0), batch_size=3)
        >>> with sf.fake_world(2):
        ...     mesh = sf.make_mesh((2,), ("dp",))
        ...     for x in sf.loader(data, mesh, sf.P("dp")):
        ...         print(tuple(x.to_local().shape), sf.full(x))
        (2,) tensor([0., 1., 2.])
        (1,) tensor([3., 4.])
    """
    accept("loader", data=data, seed=seed, rows=rows)
    check_mesh("loader", mesh)
    refuse_unusable_mesh("loader", mesh)
    checks.check_data(data)
    checks.check_axes(placements, mesh)
    first = placing.rows_of(placements)
    if rows:
        checks.check_rows(data, placements, first)
    by_rows = first is not None and (is_by_rows(data) if rows is None else rows)
    return Loader(data, mesh, placements, seed, first if by_rows else None)
