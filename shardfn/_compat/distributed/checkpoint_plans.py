"""torch.distributed.checkpoint decides which rank writes and reads which chunk of each tensor;
the caller decides where it is stored. It is imported when a checkpoint is first written or read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from .checkpoints import chunk, is_of_one_process, plans_of_one_process


@attrs.frozen
class Chunk:
    """A block of a global tensor, and where it is stored.

    Args:
        name: of the tensor.
        offsets, sizes: of the block in the global tensor, in elements.
        part: the number of the rank that writes it.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    part: int


@attrs.frozen
class Writing:
    """The steps of writing a checkpoint, as torch.distributed.checkpoint calls them.

    Args:
        prepare: run by one rank before any rank writes; returns the folder.
        write: run by each rank that has chunks, with the folder, its number, and the chunks.
        finish: run by one rank after all have written, with the folder and all chunks.
    """

    prepare: Callable[[], str]
    write: Callable[[str, int, list[tuple[Chunk, torch.Tensor]]], None]
    finish: Callable[[str, list[Chunk]], None]


Read = Callable[[Chunk, tuple[slice, ...]], torch.Tensor]  # a block of a chunk


def save_planned(
    state: Mapping[str, torch.Tensor],
    writing: Writing,
    *,
    is_alone: bool,
    group: Any = None,
) -> str:
    """Write each chunk of each tensor once.

    Args:
        state: plain tensors and DTensors by name.
        writing: called with the chunks.
        is_alone: this process plays all ranks of a fake world.
        group: a process group; None for that of the world.

    Returns:
        The folder, on every rank.

    Raises:
        Exception: the exception of the first rank that failed, on every rank.
    """
    # dcp.save warns where there is one process.
    from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

    writer = _writer_class()(writing)
    with _one_process(is_alone), _raising_the_cause():
        no_dist = is_alone or not torch.distributed.is_initialized()
        _save_state_dict(dict(state), writer, group, no_dist=no_dist)
    return writer.folder


def load_planned(
    state: Mapping[str, torch.Tensor],
    stored: Mapping[str, Sequence[Chunk]],
    read: Read,
    *,
    is_alone: bool,
) -> None:
    """Fill tensors with the blocks of them that this rank holds.

    Args:
        state: plain tensors and DTensors by name, written in place.
        stored: the chunks of each of these tensors.
        read: reads a block of a chunk.
        is_alone: this process plays all ranks of a fake world.

    Raises:
        Exception: the exception of the first rank that failed, on every rank.
    """
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    reader = _reader_class()(state, stored, read)
    with _one_process(is_alone), _raising_the_cause():
        no_dist = is_alone or not torch.distributed.is_initialized()
        _load_state_dict(dict(state), reader, no_dist=no_dist)


def _one_process(is_alone: bool) -> contextlib.AbstractContextManager[None]:
    """The context of a fake world, entered already if torch.distributed.checkpoint was imported
    before that world.
    """
    is_entered = not is_alone or is_of_one_process()
    return contextlib.nullcontext() if is_entered else plans_of_one_process()


@contextlib.contextmanager
def _raising_the_cause() -> Iterator[None]:
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        cause, _ = error.failures[min(error.failures)]
        raise cause from None


def _done(value: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(value)
    return future


@functools.cache
def _writer_class() -> Any:
    from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

    class Writer(StorageWriter):
        """The folder and the number of a rank travel with its plan."""

        def __init__(self, writing: Writing) -> None:
            self.writing = writing
            self.folder = ""

        def reset(self, checkpoint_id: Any = None) -> None: ...

        def set_up_storage_writer(
            self, is_coordinator: bool, *_: Any, **__: Any
        ) -> None: ...

        def prepare_local_plan(self, plan: Any) -> Any:
            return plan

        def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
            folder = self.writing.prepare()
            return [
                dataclasses.replace(plan, storage_data=(folder, part))
                for part, plan in enumerate(plans)
            ]

        def write_data(self, plan: Any, planner: Any) -> Any:
            self.folder, part = plan.storage_data
            written = [
                (_chunk_of(item, part), planner.resolve_data(item).detach())
                for item in plan.items
            ]
            if written:
                self.writing.write(self.folder, part, written)
            chunks = [chunk for chunk, _ in written]
            return _done(
                [
                    WriteResult(item.index, x.nbytes, chunk)
                    for item, chunk, (_, x) in zip(
                        plan.items, chunks, written, strict=True
                    )
                ]
            )

        def finish(self, metadata: Any, results: list[list[Any]]) -> None:
            del metadata
            chunks = [done.storage_data for rank in results for done in rank]
            self.writing.finish(self.folder, chunks)

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
            return True

    return Writer


def _chunk_of(item: Any, part: int) -> Chunk:
    """The chunk that an item of a plan writes: a plain tensor is one chunk."""
    data = item.tensor_data
    return Chunk(
        item.index.fqn, tuple(data.chunk.offsets), tuple(data.chunk.sizes), part
    )


@functools.cache
def _reader_class() -> Any:
    from torch.distributed.checkpoint.storage import StorageReader

    class Reader(StorageReader):
        def __init__(self, state: Any, stored: Any, read: Read) -> None:
            self.state, self.stored, self.read = state, stored, read

        def reset(self, checkpoint_id: Any = None) -> None: ...

        def read_metadata(self, *_: Any, **__: Any) -> Any:
            return _metadata(self.state, self.stored)

        def set_up_storage_reader(
            self, metadata: Any, is_coordinator: bool, *_: Any, **__: Any
        ) -> None: ...

        def prepare_local_plan(self, plan: Any) -> Any:
            return plan

        def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
            return plans

        def read_data(self, plan: Any, planner: Any) -> Any:
            chunks = {
                (chunk.name, chunk.offsets): chunk
                for of_tensor in self.stored.values()
                for chunk in of_tensor
            }
            for item in plan.items:
                index = item.storage_index
                block = zip(item.storage_offsets, item.lengths, strict=True)
                slices = tuple(slice(start, start + n) for start, n in block)
                target = planner.resolve_tensor(item).detach()
                chunk = chunks[index.fqn, tuple(index.offset)]
                target.copy_(self.read(chunk, slices))
                planner.commit_tensor(item, target)
            return _done(None)

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
            return True

    return Reader


def _metadata(
    state: Mapping[str, torch.Tensor], stored: Mapping[str, Sequence[Chunk]]
) -> Any:
    from torch.distributed.checkpoint.metadata import (
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    found: dict[str, Any] = {
        name: TensorStorageMetadata(
            TensorProperties(dtype=x.dtype),
            torch.Size(x.shape),
            [chunk(c.offsets, c.sizes) for c in stored[name]],
        )
        for name, x in state.items()
    }
    return Metadata(found)
