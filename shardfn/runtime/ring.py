"""Reduce in the order of Gloo's ring, so that simulated sums equal real ones bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

SEGMENT_BYTES = 1 << 20

Reduce = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def ring_reduce(values: Sequence[torch.Tensor], reduce: Reduce) -> torch.Tensor:
    """Reduce one value per rank in the order of Gloo's ring.

    Chunk c starts with rank c - 1 and goes round backwards; a chunk is a whole number of
    segments, two or more a rank.

    Args:
        values: one tensor per rank, of one shape and dtype, contiguous.
        reduce: adds, or takes the larger or smaller value.

    Returns:
        The result of a Gloo all-reduce.

    Source: the ring of Gloo's allreduce.cc; orders measured on 2 to 4 processes, sizes 1 to
    300,000.

    Example:
        >>> ring_reduce([torch.tensor([1, 2]), torch.tensor([3, 4])], torch.add)
        tensor([4, 6])
    """
    n = len(values)
    flat = [v.reshape(-1) for v in values]
    out = torch.empty_like(flat[0])
    length = chunk_length(out.numel(), out.element_size(), n)
    for c in range(n):
        start = c * length
        chunk = slice(start, start + length)
        first = c - 1
        total = flat[first % n][chunk]
        for step in range(1, n):
            rank = (first - step) % n
            total = reduce(total, flat[rank][chunk])
        out[chunk] = total
    return out.view(values[0].shape)


def chunk_length(count: int, itemsize: int, n: int) -> int:
    """Compute the number of elements in a rank's chunk of the ring."""
    total = count * itemsize
    largest = itemsize * max(1, SEGMENT_BYTES // itemsize)
    least = _divided(total, largest)
    segments = _round_up(max(least, 2 * n), n)
    nbytes = _round_up(_divided(total, segments), itemsize)
    segments_of_rank = segments // n
    return segments_of_rank * nbytes // itemsize


def _divided(value: int, by: int) -> int:
    """Divide, rounding up."""
    return -(-value // by)


def _round_up(value: int, multiple: int) -> int:
    return _divided(value, multiple) * multiple
