"""torch.distributed.checkpoint in a fake world of one process, where it asks no other process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .. import threads


@contextlib.contextmanager
def plans_of_one_process() -> Iterator[None]:
    """Patch torch.distributed.checkpoint to plan in this process alone."""
    from torch.distributed.checkpoint.utils import _DistWrapper

    def alone(original: Any, wrapper: Any, group: Any, _: bool, rank: int) -> None:
        original(wrapper, group, False, rank)

    with threads.overridden(_DistWrapper, "__init__", alone, lambda: True):
        yield


def is_of_one_process() -> bool:
    """Check whether `plans_of_one_process` is active."""
    from torch.distributed.checkpoint.utils import _DistWrapper

    return hasattr(_DistWrapper.__init__, "__wrapped__")


def chunk(offsets: Sequence[int], sizes: Sequence[int]) -> Any:
    """Make torch's checkpoint record of a shard: its offsets and sizes in the global tensor."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def write_item(fqn: str, x: torch.Tensor, chunk: Any) -> Any:
    """Make the WriteItem that has a checkpoint write one chunk of a DTensor."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    kind = TensorProperties.create_from_tensor(torch.empty(0, dtype=x.dtype, device=x.device))
    data = TensorWriteData(chunk=chunk, properties=kind, size=x.size())
    index = MetadataIndex(fqn, chunk.offsets)
    return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)
