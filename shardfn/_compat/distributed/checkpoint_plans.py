"""torch.distributed.checkpoint knows which chunks of its tensors a rank holds, which rank writes
each, and what a rank reads. It is imported when a checkpoint is first written or read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from .checkpoints import chunk, is_of_one_process, plans_of_one_process, write_item


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
class Held:
    """A chunk that a rank could write.

    Args:
        name: of the tensor.
        offsets, sizes: of the block in the global tensor, in elements.
        shape: of the global tensor.
        dtype: of both.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


def held_chunks(state: Mapping[str, torch.Tensor]) -> list[tuple[Held, torch.Tensor]]:
    """The chunks of tensors that this rank holds, with their values.

    Args:
        state: plain tensors and DTensors by name.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(state))
    with _local():
        items = planner.create_local_plan().items
        values: list[Any] = list(map(planner.resolve_data, items))
    return [(_held(item), x.detach()) for item, x in zip(items, values, strict=True)]


def _held(item: Any) -> Held:
    data = item.tensor_data
    return Held(
        item.index.fqn,
        tuple(data.chunk.offsets),
        tuple(data.chunk.sizes),
        tuple(data.size),
        data.properties.dtype,
    )


def _local() -> contextlib.AbstractContextManager[None]:
    """The context of a fake world, entered already if torch.distributed.checkpoint was imported
    before that world. No process asks another one in it.
    """
    return contextlib.nullcontext() if is_of_one_process() else plans_of_one_process()


def written_once(chunks: Sequence[Sequence[Held]]) -> list[list[int]]:
    """Which rank writes each chunk: about as many bytes on each.

    Args:
        chunks: those that each rank holds.

    Returns:
        The places of what a rank writes in its own list, for each rank.

    Raises:
        ValueError: the chunks of a tensor overlap, or leave a part of it.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import SavePlan

    plans = [SavePlan([_item(held) for held in of]) for of in chunks]
    planner = DefaultSavePlanner(flatten_state_dict=False)
    chosen, _ = planner.create_global_plan(plans)
    kept = [{item.index for item in plan.items} for plan in chosen]
    return [
        [i for i, item in enumerate(plan.items) if item.index in indices]
        for plan, indices in zip(plans, kept, strict=True)
    ]


def _item(held: Held) -> Any:
    x = torch.empty(held.shape, dtype=held.dtype, device="meta")
    return write_item(held.name, x, chunk(held.offsets, held.sizes))


def blocks_read(
    state: Mapping[str, torch.Tensor], stored: Mapping[str, Sequence[Chunk]]
) -> list[tuple[Chunk, tuple[slice, ...], torch.Tensor]]:
    """The blocks of a checkpoint that this rank reads.

    Args:
        state: plain tensors and DTensors by name.
        stored: the chunks of each of these tensors.

    Returns:
        Chunks, with a block of each, and the memory of this rank that the block belongs in.

    Raises:
        ValueError: the chunks of a tensor leave a part of it.
    """
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    chunks = {
        (chunk.name, chunk.offsets): chunk for of_tensor in stored.values() for chunk in of_tensor
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(state), _metadata(state, stored))
    out = []
    with _local():
        for item in planner.create_local_plan().items:
            index: Any = item.storage_index
            place = zip(item.storage_offsets, item.lengths, strict=True)
            block = tuple(slice(start, start + n) for start, n in place)
            target = planner.resolve_tensor(item).detach()
            out.append((chunks[index.fqn, tuple(index.offset)], block, target))
    return out


def _metadata(state: Mapping[str, torch.Tensor], stored: Mapping[str, Sequence[Chunk]]) -> Any:
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
