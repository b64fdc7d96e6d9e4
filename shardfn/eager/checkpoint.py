"""Checkpoints of simulated DTensors: one process writes and reads the shards of all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .. import _compat
from ..errors import ShardError
from ..own_dtensors import is_here
from ..placement import Stage

IN_ONE_BLOCK = (Replicate, Stage)


def chunks(x: DTensor) -> list[Any]:
    """List the offsets and sizes of each rank's shard in the global tensor, in row-major order of
    the mesh. Ranks of other stages have none.

    Raises:
        ShardError: a shard is not one block of the global tensor, or
            torch.distributed.checkpoint was imported inside the world.
    """
    if not _compat.is_of_one_process():
        fix = "import torch.distributed.checkpoint before the world is entered"
        raise ShardError.of("a checkpoint", "it would wait for other processes", fix=fix)
    return [_chunk(x, coordinates) for coordinates in _coordinates(x).values()]


def _coordinates(x: DTensor) -> dict[int, tuple[int, ...]]:
    """The coordinates of each rank that has a shard, by its place in the mesh."""
    everyone = enumerate(itertools.product(*(range(n) for n in x.device_mesh.shape)))
    return {place: at for place, at in everyone if is_here(x.placements, at)}


def has_gaps(x: DTensor) -> bool:
    """Whether a shard of a DTensor is more than one block of the global tensor."""
    return any(_spans(x, at) is None for at in _coordinates(x).values())


def _chunk(x: DTensor, coordinates: Sequence[int]) -> Any:
    strange = [p for p in x.placements if _blocks(p) is None and type(p) not in IN_ONE_BLOCK]
    spans = None if strange else _spans(x, coordinates)
    if spans is None:
        got = f"a {(strange or x.placements)[0]}"
        fix = "x.redistribute(placements=...) before it is saved"
        needed = "Shard and Replicate"
        raise ShardError.of("a checkpoint", got, needed=needed, fix=fix)
    offsets = [start for start, _ in spans]
    return _compat.chunk(offsets, [end - start for start, end in spans])


def _spans(x: DTensor, coordinates: Sequence[int]) -> list[tuple[int, int]] | None:
    """Return the start and end of a rank's shard in each dim; None if it is not one block."""
    sizes = x.device_mesh.shape
    rows = [*zip(x.placements, sizes, coordinates, strict=True)]
    found = []
    for dim, size in enumerate(x.shape):
        mine = [row for row in rows if getattr(row[0], "dim", None) == dim]
        axes = [(n, _blocks(place) or 1) for place, n, _ in mine]
        span = _compat.span(size, axes, [c for *_, c in mine])
        if span is None:
            return None
        found.append(span)
    return found


def _blocks(place: Placement) -> int | None:
    """Return the number of blocks as which a placement views its dim; None for one that does not
    shard.
    """
    return 1 if type(place) is Shard else _compat.split_factor(place)


def write_items(fqn: str, x: DTensor) -> list[Any]:
    """List DCP write items that write each shard once, without empty ones.

    Args:
        fqn: the name of the tensor in the state dict.
        x: the tensor.
    """
    found = {c.offsets: c for c in chunks(x) if c.sizes.numel() or not x.numel()}
    return [_compat.write_item(fqn, x, chunk) for chunk in found.values()]


def shard(x: DTensor, index: Any) -> torch.Tensor:
    """Return the shard that a DCP item refers to.

    An item that is read has the number of its shard. An item that is written may have its number
    among the chunks of the plan, which has each chunk once: there the place counts.
    """
    local: Any = _compat.local_tensor(x)
    shards = [local.shards[k] for k in _coordinates(x)]
    places = [c.offsets for c in chunks(x)]
    place = torch.Size(index.offset)
    number = index.index
    if number is not None and number < len(places) and places[number] == place:
        return shards[number]
    return shards[places.index(place)]
