"""Which elements of a dim a rank has where DTensor shards it over several axes, some by strided
shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

Runs = list[tuple[int, int]]  # of elements, each from its start to its end


def is_in_order(size: int, dim: int, marks: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Check whether DTensor's shards of a dim equal those of sharding it over its axes one after
    the other, fewest blocks first.

    Args:
        size: of the dim.
        dim: its number.
        marks: the placements of the tensor.
        sizes: of the mesh.
    """
    cuts = [_cut_on(mark, dim) for mark in marks]
    axes = [(n, blocks) for n, blocks in zip(sizes, cuts, strict=True) if blocks]
    order = sorted(range(len(axes)), key=lambda k: axes[k][1])
    for at in itertools.product(*(range(n) for n, _ in axes)):
        mine = _runs_of(size, axes, at)
        wanted = [(0, size)]
        for k in order:
            wanted = _chunk_of(wanted, axes[k][0], at[k])
        if _elements(mine) != _elements(wanted):
            return False
    return True


def span(size: int, axes: Sequence[tuple[int, int]], at: Sequence[int]) -> tuple[int, int] | None:
    """Return the (start, end) of a rank's elements of a dim, given its coordinates. None if they
    are not contiguous.

    Args:
        size: of the dim.
        axes: that shard it, each with its size and the number of blocks as which it views the dim.
        at: the coordinates of the rank on them.
    """
    ends = _elements(_runs_of(size, axes, at)) or [size, size]
    return (ends[0], ends[1]) if len(ends) == 2 else None


def _runs_of(size: int, axes: Sequence[tuple[int, int]], at: Sequence[int]) -> Runs:
    """List the contiguous runs of a dim's elements that DTensor gives the rank at these
    coordinates.
    """
    mine = [(0, size)]
    for (n, blocks), c in zip(axes, at, strict=True):
        parts = [_chunk_of(mine, blocks, i) for i in range(blocks)]
        mine = [run for part in parts for run in _chunk_of(part, n, c)]
    return mine


def _cut_on(mark: Any, dim: int) -> int:
    """Return how many blocks a placement splits a dim into; 0 if it shards another dim."""
    if isinstance(mark, tuple):
        return mark[2] if mark[0] == dim else 0
    return int(mark == dim)


def _chunk_of(runs: Runs, n: int, number: int) -> Runs:
    """Return the k-th of n chunks of some runs."""
    total = sum(end - start for start, end in runs)
    full = -(-total // n)
    found = []
    left = number * full
    wanted = full
    for start, end in runs:
        skipped = min(left, end - start)
        taken = min(wanted, end - start - skipped)
        left -= skipped
        wanted -= taken
        if taken:
            found.append((start + skipped, start + skipped + taken))
    return found


def _elements(runs: Runs) -> list[int]:
    """Merge adjacent runs, and return their starts and ends in order."""
    found: list[int] = []
    for start, end in runs:
        if found and found[-1] == start:
            found.pop()
        else:
            found.append(start)
        found.append(end)
    return found
