"""How DTensor shards a dim over several mesh axes of which some are strided shards."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

Runs = list[tuple[int, int]]  # of elements, each from its start to its end


def is_in_order(size: int, dim: int, marks: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Whether the shards that DTensor makes of a dim are those of axes that shard it one after
    the other, the ones with the fewest blocks first.

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
    """The start and the end of the elements of a dim that DTensor gives a rank, or None if others
    lie between them.

    Args:
        size: of the dim.
        axes: that shard it, each with its size and the number of blocks as which it views the dim.
        at: the coordinates of the rank on them.
    """
    ends = _elements(_runs_of(size, axes, at)) or [size, size]
    return (ends[0], ends[1]) if len(ends) == 2 else None


def _runs_of(size: int, axes: Sequence[tuple[int, int]], at: Sequence[int]) -> Runs:
    """The elements of a dim that DTensor gives a rank."""
    mine = [(0, size)]
    for (n, blocks), c in zip(axes, at, strict=True):
        parts = [_chunk_of(mine, blocks, i) for i in range(blocks)]
        mine = [run for part in parts for run in _chunk_of(part, n, c)]
    return mine


def _cut_on(mark: Any, dim: int) -> int:
    """As how many blocks a placement views a dim that it shards; 0 if it shards another one."""
    if isinstance(mark, tuple):
        return mark[2] if mark[0] == dim else 0
    return int(mark == dim)


def _chunk_of(runs: Runs, n: int, number: int) -> Runs:
    """One of n chunks of some runs."""
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
    """The starts and ends of some runs, without those at which one follows another."""
    found: list[int] = []
    for start, end in runs:
        if found and found[-1] == start:
            found.pop()
        else:
            found.append(start)
        found.append(end)
    return found
