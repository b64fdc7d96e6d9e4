"""Checkpoints of simulated DTensors: one process writes and reads the shards of all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from .. import _compat
from ..errors import ShardError


def chunks(x: DTensor) -> list[Any]:
    """The place of each rank's shard in the global tensor, in the mesh's row-major order.

    Raises:
        ShardError: it has placements that are neither Shard nor Replicate, or
            torch.distributed.checkpoint was imported inside the world.
    """
    if not _compat.is_of_one_process():
        fix = "import torch.distributed.checkpoint before the world is entered"
        raise ShardError.of(
            "a checkpoint", "it would wait for other processes", fix=fix
        )
    sizes = tuple(x.device_mesh.shape)
    everyone = itertools.product(*(range(n) for n in sizes))
    return [_chunk(x, sizes, coordinates) for coordinates in everyone]


def _chunk(x: DTensor, sizes: Sequence[int], coordinates: Sequence[int]) -> Any:
    offsets = [0] * x.dim()
    shape = list(x.shape)
    for place, n, c in zip(x.placements, sizes, coordinates, strict=True):
        if type(place) is Replicate:
            continue
        if type(place) is not Shard:
            fix = "x.redistribute(placements=...) before it is saved"
            needed = "Shard and Replicate"
            raise ShardError.of(
                "a checkpoint", f"a {place}", needed=needed, fix=fix
            )
        step = -(-shape[place.dim] // n)
        start = min(step * c, shape[place.dim])
        offsets[place.dim] += start
        shape[place.dim] = min(step, shape[place.dim] - start)
    return _compat.chunk(offsets, shape)


def write_items(fqn: str, x: DTensor) -> list[Any]:
    """The items of a plan that writes each shard once, without empty ones.

    Args:
        fqn: the name of the tensor in the state dict.
        x: the tensor.
    """
    found = {c.offsets: c for c in chunks(x) if c.sizes.numel() or not x.numel()}
    return [_compat.write_item(fqn, x, chunk) for chunk in found.values()]


def shard(x: DTensor, index: Any) -> torch.Tensor:
    """The shard that an item of a plan is about.

    An item that is read has the number of its rank. An item that is written may have its number
    among the chunks of the plan, which has each chunk once: there the place counts.
    """
    local: Any = _compat.local_tensor(x)
    places = [c.offsets for c in chunks(x)]
    place = torch.Size(index.offset)
    number = index.index
    if number is not None and number < len(places) and places[number] == place:
        return local.shards[number]
    return local.shards[places.index(place)]
