"""Reduce in the order of Gloo's ring, so that simulated sums equal real ones bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

SEGMENT_BYTES = 1 << 20

Reduce = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def ring_reduce(values: Sequence[torch.Tensor], reduce: Reduce) -> torch.Tensor:
    """The reduction of one value per rank.

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
    step = chunk_length(out.numel(), out.element_size(), n)
    for c in range(n):
        part = slice(c * step, (c + 1) * step)
        total = flat[(c - 1) % n][part]
        for j in range(1, n):
            total = reduce(total, flat[(c - 1 - j) % n][part])
        out[part] = total
    return out.view(values[0].shape)


def chunk_length(count: int, itemsize: int, n: int) -> int:
    """Elements in a rank's chunk of the ring."""
    total = count * itemsize
    largest = itemsize * max(1, SEGMENT_BYTES // itemsize)
    segments = _round_up(max(-(-total // largest), 2 * n), n)
    segment = _round_up(-(-total // segments), itemsize)
    return segments // n * segment // itemsize


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
