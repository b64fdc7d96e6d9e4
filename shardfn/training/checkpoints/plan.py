"""The plan of a save: which rank writes which chunk, in numbers and names that ranks exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..._compat.distributed.checkpoint_plans import Chunk, Held, written_once
from .manifest import dtype_of, name_of, sizes_of


def told(chunks: Sequence[Held]) -> list[Any]:
    """The chunks that a rank holds, as JSON."""
    return [
        [held.name, held.offsets, held.sizes, held.shape, name_of(held.dtype)] for held in chunks
    ]


def heard(rows: Any) -> list[Held]:
    """The chunks that another rank holds.

    Raises:
        TypeError, ValueError: they are something else.
    """
    return [_held(*row) for row in rows]


def _held(name: str, offsets: Any, sizes: Any, shape: Any, dtype: str) -> Held:
    of_block = sizes_of(offsets), sizes_of(sizes)
    return Held(str(name), *of_block, sizes_of(shape), dtype_of(dtype))


def written(chunks: Sequence[Sequence[Held]]) -> tuple[list[list[int]], list[Chunk]]:
    """Which rank writes which of its chunks.

    Args:
        chunks: those that each rank holds.

    Returns:
        places: of what each rank writes, in its list.
        chunks: all that are written.
    """
    places = written_once(chunks)
    return places, [
        Chunk(held.name, held.offsets, held.sizes, part)
        for part, some in enumerate(places)
        for held in map(chunks[part].__getitem__, some)
    ]


def numbered(
    held: Sequence[tuple[Held, torch.Tensor]], places: Any, part: int
) -> list[tuple[Chunk, torch.Tensor]]:
    """The chunks that this rank writes, with their values.

    Args:
        held: all of its chunks.
        places: of those that it writes.
        part: its number.
    """
    return [
        (Chunk(x.name, x.offsets, x.sizes, part), value)
        for x, value in (held[i] for i in sizes_of(places))
    ]
