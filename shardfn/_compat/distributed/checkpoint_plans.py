"""torch.distributed.checkpoint (DCP) plans which rank writes and reads which chunk of a tensor, and
writes the files. It is imported when a checkpoint is first written or read.

Its `save` and `load` exchange pickles between ranks. Here the ranks exchange rows of JSON, and
DCP's planner and storage do the rest.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import torch

from .checkpoints import chunk, is_of_one_process, plans_of_one_process


class LocalSave:
    """The tensors and values that one rank could write.

    Args:
        state: plain tensors, DTensors and other values by name.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        planner = _planner()
        planner.set_up_planner(dict(state))
        with _of_this_process():
            self.items = planner.create_local_plan().items
            self.data = {item.index: planner.resolve_data(item) for item in self.items}

    def rows(self) -> list[Any]:
        """The items for the first rank, as JSON."""
        return list(map(_row, self.items))

    def write(self, folder: str, rank: int, places: Sequence[int]) -> list[list[int]]:
        """Write some of the items to the file of this rank, and have it on disk.

        Args:
            folder: of the checkpoint.
            rank: the number of this rank.
            places: of the items, in the list of all.

        Returns:
            Where each item starts in the file, and its length in bytes.
        """
        from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StoragePrefix
        from torch.distributed.checkpoint.planner import SavePlan

        items = [self.items[i] for i in places]
        plan = SavePlan(items, _StoragePrefix(f"__{rank}_"))
        planner: Any = SimpleNamespace(resolve_data=lambda item: self.data[item.index])
        try:
            results = FileSystemWriter(folder).write_data(plan, planner).wait() if items else []
        except RuntimeError as error:  # torch.save ends its file after the disk has refused it
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        written = {result.index: result.storage_data for result in results}
        return [[written[x.index].offset, written[x.index].length] for x in items]


def import_writer() -> None:
    """Import what DCP imports when a checkpoint is written."""
    import torch.distributed.checkpoint.filesystem
    import torch.utils.serialization.config  # noqa: F401


@attrs.frozen
class GlobalSave:
    """What all ranks write.

    Args:
        places: of what each rank writes, in its list of items.
        indices: DCP's names of these items.
        metadata: DCP's record of the checkpoint.
    """

    places: list[list[int]]
    indices: list[list[Any]]
    metadata: Any

    def finish(self, folder: str, results: Sequence[Sequence[Sequence[int]]]) -> None:
        """Write the metadata: the checkpoint is complete.

        Args:
            folder: of the checkpoint.
            results: what `LocalSave.write` has returned on each rank.
        """
        from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
        from torch.distributed.checkpoint.storage import WriteResult

        def result(rank: int, index: Any, place: Sequence[int]) -> Any:
            start, length = sizes_of(place)
            return WriteResult(index, length, _StorageInfo(f"__{rank}_0.distcp", start, length))

        rows = [
            [*map(functools.partial(result, rank), indices, places)]
            for rank, (indices, places) in enumerate(zip(self.indices, results, strict=True))
        ]
        FileSystemWriter(folder).finish(self.metadata, rows)


def global_save(rows: Sequence[Sequence[Any]]) -> GlobalSave:
    """Choose which rank writes each item: about as many bytes on each.

    Args:
        rows: of each rank.

    Raises:
        ValueError: the chunks of a tensor overlap, or leave a part of it; rows of another form.
    """
    from torch.distributed.checkpoint.planner import SavePlan

    plans = [SavePlan([_item(*row) for row in of_rank]) for of_rank in rows]
    chosen, metadata = _planner().create_global_plan(plans)
    indices = [[item.index for item in plan.items] for plan in chosen]
    places = [
        [i for i, item in enumerate(plan.items) if item.index in kept]
        for plan, kept in zip(plans, map(set, indices), strict=True)
    ]
    return GlobalSave(places, indices, metadata)


def _planner() -> Any:
    """DCP's planner, which leaves dicts in a state as they are."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    return DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


def _row(item: Any) -> list[Any]:
    """An item as JSON: its name, and the place, the shape and the dtype of a chunk."""
    x = item.tensor_data
    if x is None:
        return [item.index.fqn]
    return [item.index.fqn, x.chunk.offsets, x.chunk.sizes, x.size, str(x.properties.dtype)]


def _item(name: Any, *data: Any) -> Any:
    """The item of a row, which somebody else may have written."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    if not data:
        return WriteItem(MetadataIndex(str(name)), WriteItemType.BYTE_IO)
    offsets, sizes, shape = map(sizes_of, data[:3])
    if not len(offsets) == len(sizes) == len(shape):
        raise ValueError(f"a chunk {sizes} of a tensor {shape}")
    kind = TensorProperties(dtype_of(data[3]))
    tensor_data = TensorWriteData(chunk(offsets, sizes), kind, torch.Size(shape))
    index = MetadataIndex(str(name), offsets)
    return WriteItem(index, WriteItemType.SHARD, tensor_data=tensor_data)


def _of_this_process() -> contextlib.AbstractContextManager[None]:
    """The context of a fake world, entered already if torch.distributed.checkpoint was imported
    before that world. No process asks another one in it.
    """
    return contextlib.nullcontext() if is_of_one_process() else plans_of_one_process()


def blocks_read(
    state: Mapping[str, torch.Tensor], metadata: Any
) -> list[tuple[Any, tuple[slice, ...], torch.Tensor]]:
    """The blocks of a checkpoint that this rank reads.

    Args:
        state: plain tensors and DTensors by name.
        metadata: DCP's record of the checkpoint.

    Returns:
        DCP's name of a chunk, a block of it, and the memory of this rank that the block belongs in.
    """
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(state), metadata)
    blocks = []
    with _of_this_process():
        for item in planner.create_local_plan().items:
            place = zip(item.storage_offsets, item.lengths, strict=True)
            slices = tuple(slice(start, start + n) for start, n in place)
            blocks.append((item.storage_index, slices, planner.resolve_tensor(item).detach()))
    return blocks


def metadata_of(tensors: Mapping[str, torch.Tensor]) -> Any:
    """DCP's record of tensors that lie in files as one chunk each."""
    from torch.distributed.checkpoint.metadata import (
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    records: dict[str, Any] = {
        name: TensorStorageMetadata(
            TensorProperties(x.dtype), x.shape, [chunk([0] * x.dim(), x.shape)]
        )
        for name, x in tensors.items()
    }
    return Metadata(records)


def sizes_of(x: Any) -> tuple[int, ...]:
    """Numbers that are not negative.

    Raises:
        TypeError, ValueError: something else.
    """
    if not all(type(n) is int and n >= 0 for n in x):
        raise ValueError(f"{x!r} instead of sizes")
    return tuple(x)


def dtype_of(name: Any) -> torch.dtype:
    """The dtype of a text.

    Raises:
        TypeError, ValueError: the text is the name of something else.
    """
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} instead of a dtype")
    return dtype
