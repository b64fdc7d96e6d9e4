"""Checkpoints of simulated DTensors: one process writes and reads the shards of all ranks."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from .. import _compat
from ..errors import ShardError
from ..own_dtensors import Block, blocks, is_here
from ..placement import Stage, Zigzag

KNOWN = (Shard, Replicate, Stage, Zigzag)


def chunks(x: DTensor) -> list[Any]:
    """List the offsets and sizes of the blocks of the global tensor that each rank has, in
    row-major order of the mesh. Ranks of other stages have none.

    Raises:
        ShardError: a strided shard has gaps, a rank has a term of a Partial sum, or
            torch.distributed.checkpoint was imported inside the world.
    """
    if not _compat.is_of_one_process():
        fix = "import torch.distributed.checkpoint before the world is entered"
        raise ShardError.of(
            "a checkpoint", "the checkpoint would wait for other processes", fix=fix
        )
    return [_compat.chunk(block.offsets, block.sizes) for _, block in _held(x)]


def _coordinates(x: DTensor) -> dict[int, tuple[int, ...]]:
    """The coordinates of each rank that has a shard, by its place in the mesh."""
    everyone = enumerate(itertools.product(*(range(n) for n in x.device_mesh.shape)))
    return {place: at for place, at in everyone if is_here(x.placements, at)}


def has_gaps(x: DTensor) -> bool:
    """Whether a shard of a DTensor has gaps: other runs than one, or the two of a zigzag."""
    return any(blocks(x, at) is None for at in _coordinates(x).values())


def _held(x: DTensor) -> list[tuple[int, Block]]:
    """The blocks of the global tensor that ranks have, each with the place of its rank.

    Raises:
        ShardError: a strided shard has gaps, or a rank has a term of a Partial sum.
    """
    strange = [p for p in x.placements if type(p) not in KNOWN and not _compat.split_factor(p)]
    if strange or has_gaps(x):
        got = f"a {(strange or x.placements)[0]}"
        fix = "call x.redistribute(placements=...) before saving x"
        needed = "Shard and Replicate"
        raise ShardError.of("a checkpoint", got, needed=needed, fix=fix)
    everyone = _coordinates(x).items()
    return [(place, block) for place, at in everyone for block in blocks(x, at) or ()]


def write_items(fqn: str, x: DTensor) -> list[Any]:
    """List DCP write items that write each shard once, without empty ones.

    Args:
        fqn: the name of the tensor in the state dict.
        x: the tensor.
    """
    found = {c.offsets: c for c in chunks(x) if c.sizes.numel() or not x.numel()}
    return [_compat.write_item(fqn, x, chunk) for chunk in found.values()]


def shard(x: DTensor, index: Any) -> torch.Tensor:
    """Return the block of a shard that a DCP item refers to.

    An item that is read has the number of its block. An item that is written may have its number
    among the chunks of the plan, which has each chunk once: there the place counts.
    """
    local: Any = _compat.local_tensor(x)
    held = _held(x)
    places = [block.offsets for _, block in held]
    offsets = tuple(index.offset)
    number = index.index
    if number is None or number >= len(places) or places[number] != offsets:
        number = places.index(offsets)
    place, block = held[number]
    return block.of(local.shards[place])
