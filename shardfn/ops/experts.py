"""The op `shardfn::checked_groups`: refuses routes of rows that the ranks of experts cannot take.

Every rank has the counts of all ranks, so all of them refuse alike, before a row is sent.
"""

from __future__ import annotations

import torch

from ..errors import CapacityError, ShardError


@torch.library.custom_op("shardfn::checked_groups", mutates_args=())
def checked_groups(
    counts: torch.Tensor,
    needed: torch.Tensor,
    first: torch.Tensor,
    groups: int,
    chunk: int,
    total: int,
    rows: int,
    strict: bool,
    name: str,
) -> torch.Tensor:
    """Check how many rows each rank sends to each group.

    Args:
        counts: (n, groups or more), int64: of each rank of an axis, the rows of each group, and
            then those of numbers that are no group.
        needed: (2,), int64: the most rows that a rank gets, times `total`, plus its group that gets
            the most of them; and the most rows of no group. Both on any coordinate of the mesh.
        first: a scalar, int64: the number of the first group.
        groups: of the axis.
        chunk: those of each rank of the axis.
        total: of all axes.
        rows: that each rank can take.
        strict: whether every number must be that of a group.
        name: of the weights of the groups, for errors.

    Returns:
        The counts.

    Raises:
        ShardError: a number is not that of a group.
        CapacityError: a rank gets more rows than it can take.
    """
    table = counts.cpu()
    fullest, outside = needed.tolist()
    most, expert = divmod(fullest, total)
    if strict and outside:
        raise ShardError.of(
            name,
            f"{outside} rows have an expert number outside the valid range",
            needed=f"expert numbers from 0 to {groups - 1}",
            fix=f"ids.clamp(0, {groups - 1})",
        )
    if most > rows:
        raise _too_many(table[:, :groups].sum(0), int(first), chunk, most, expert, rows, name)
    return counts.clone()


checked_groups.register_fake(lambda counts, *_: torch.empty_like(counts))


def _too_many(
    by_group: torch.Tensor, first: int, chunk: int, most: int, expert: int, rows: int, name: str
) -> CapacityError:
    """Make the error that names the rank with the most rows, and its fullest expert."""
    received = [int(part.sum()) for part in by_group.split(chunk)]
    if max(received) > rows:
        rank, most = received.index(max(received)), max(received)
        own = by_group[rank * chunk : (rank + 1) * chunk]
        expert = first + rank * chunk + int(own.argmax())
        got = (
            f"rank {rank} of the axis receives {most} rows for its experts, {int(own.max())} "
            f"of them for expert {expert}, but has room for {rows}"
        )
    else:
        rank = -1
        got = (
            f"a rank at another coordinate of the mesh receives {most} rows for its experts, "
            f"the most of them for expert {expert}, but has room for {rows}"
        )
    return CapacityError.of(
        name,
        got,
        needed=f"a bound of {most} rows or more",
        fix=f"rows={most}; or leave out rows= to make room for the largest possible number",
        rank=rank,
        received=most,
        bound=rows,
    )
