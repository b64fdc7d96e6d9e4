"""loader: any iterable of batches as DTensors, each rank reading its rows."""

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
    """Batches as DTensors, once for each pass over the data.

    Args:
        data: global batches.
        mesh: a DeviceMesh.
        placements: a prefix tree over a batch.
        seed: of samplers without a generator of their own.
        rows: the placement of the rows, where each rank reads its own only; None where it
            reads all.

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
        """Where the loader is, for `sf.save` or `torch.save`: a state for any number of ranks.

        Returns:
            Numbers, the states of generators, and that of the data if it has one.

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
        """Go on where a state was taken, also on another number of ranks: the next pass has the
        batches that were left.

        Args:
            state: of `state_dict`, of a loader of the same data.

        Raises:
            CheckpointError: a state of something else.

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
        """Whether the data source has a state_dict of its own."""
        has_state = hasattr(self.data, "state_dict")
        can_load = hasattr(self.data, "load_state_dict")
        return has_state and can_load and not is_indexed(self.data)


@_compat.outside_only
def loader(
    data: Iterable[Any], mesh: Any, placements: Any, *, seed: int = 0, rows: bool | None = None
) -> Loader:
    """Turn batches of a `DataLoader` into DTensors. Each rank reads only its rows where possible.

    `data` gives global batches, the same on every rank and for every number of ranks. A
    DataLoader over a dataset with indices, with torch's own collate function, reads on each
    rank only the rows that it holds. Of any other iterable each rank reads all and keeps its
    shards. Ranks compare what they read, batch by batch.

    Args:
        data: an iterable of trees of tensors, such as a torch DataLoader, whose batch size is
            that of the global batch.
        mesh: a DeviceMesh. Shards are moved to its device.
        placements: a prefix tree of placements over a batch, such as `P("dp")`.
        seed: of the samplers of a DataLoader that have no generator of their own. The order of
            samples follows from it and from the number of the pass.
        rows: whether each rank reads only its rows. True says that the collate function works
            row by row. By default: with torch's own collate function.

    Returns:
        An iterable of batches with DTensors, with `state_dict` and `load_state_dict`, which go
        on at any number of ranks. Each `for` over it is one pass.

    Raises:
        ShardError: data that are not iterable, or are sharded by a DistributedSampler.
        PlacementError: placements that do not fit the mesh; `rows=True` for data or placements
            without rows.

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
