"""The op `shardfn::ragged_all_to_all`: each rank of a mesh axis sends rows to every other rank, as
many as a matrix of counts says.

The op reads the rank from the group when it runs, so all ranks run the same program. Every rank has
the counts of all ranks, so all of them refuse wrong counts alike, before a row is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .. import _compat
from ..errors import CapacityError, ShardError

NAME = "ragged_all_to_all"


@torch.library.custom_op("shardfn::ragged_all_to_all", mutates_args=())
def ragged_all_to_all(x: torch.Tensor, counts: torch.Tensor, rows: int, group: str) -> torch.Tensor:
    """Start an exchange of rows among ranks. `wait_tensor` waits for the result.

    Args:
        x: contiguous, (*batch, N, ...): rows in the order of their destinations; those that the
            counts leave over are not sent.
        counts: (*batch, n, n) integers, equal on all ranks; counts[s, d] rows go from s to d.
        rows: of the result; no rank may receive more.
        group: the name of the process group.

    Returns:
        (*batch, rows, ...): the received rows in the order of their senders, then zeros.

    Raises:
        CapacityError: a rank receives more rows than `rows`.
        ShardError: a count is negative, or a rank sends more rows than it has.
    """
    process_group = _compat.named_group(group)
    rank = process_group.rank()
    matrix = counts.cpu()
    check_counts(matrix, _given(x, matrix), rows)
    if matrix.dim() > 2:
        return _exchanged_batch(x, matrix, rows, process_group)
    out = x.new_empty(rows, *x.shape[1:])
    sent = matrix[rank].tolist()
    received = matrix[:, rank].tolist()
    out[sum(received) :].zero_()
    _compat.wait_later(
        out,
        dist.all_to_all_single(
            out[: sum(received)], x[: sum(sent)], received, sent, group=process_group, async_op=True
        ),
    )
    return out


def _exchanged_batch(
    x: torch.Tensor, counts: torch.Tensor, rows: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Exchange the rows of all elements of a batch at once, and wait for them: each element has
    zeros after its own rows.
    """
    *batch, n, _ = counts.shape
    rank = group.rank()
    every = counts.reshape(-1, n, n)
    flat = x.reshape(len(every), *x.shape[len(batch) :])
    to_each = _sent(flat, every, rank)
    sizes = every[:, :, rank].t()  # (n, batch)
    from_each = sizes.sum(1).tolist()
    arrived = x.new_empty(sum(from_each), *flat.shape[2:])
    dist.all_to_all_single(
        arrived,
        torch.cat([torch.cat(chunks) for chunks in to_each]),
        from_each,
        [sum(map(len, chunks)) for chunks in to_each],
        group=group,
    )
    pairs = zip(arrived.split(from_each), sizes.tolist(), strict=True)
    chunks = [own.split(lengths) for own, lengths in pairs]
    return _received(flat, chunks, rows).reshape(*batch, rows, *flat.shape[2:])


ragged_all_to_all.register_fake(
    lambda x, counts, rows, group: x.new_empty(_result_shape(x, counts, rows))
)


@torch.library.custom_op("shardfn::checked_counts", mutates_args=())
def checked_counts(counts: torch.Tensor, given: int, rows: int) -> torch.Tensor:
    """Check counts of rows where no collective does: of one rank, or of the samples of a vmap.

    Args:
        counts: (*batch, n, n) integers; counts[s, d] rows go from s to d.
        given: the rows that each has.
        rows: that each can take.

    Returns:
        The counts.

    Raises:
        CapacityError: one receives more rows than `rows`.
        ShardError: a count is negative, or one sends more rows than it has.
    """
    check_counts(counts.cpu(), given, rows)
    return counts.clone()


checked_counts.register_fake(lambda counts, given, rows: torch.empty_like(counts))


@checked_counts.register_vmap
def _(info: Any, in_dims: Any, counts: torch.Tensor, given: int, rows: int) -> tuple[Any, int]:
    return checked_counts(counts.movedim(in_dims[0], 0), given, rows), 0


# the ops that read counts on the processor, and refuse wrong ones
READS_COUNTS = (
    torch.ops.shardfn.ragged_all_to_all.default,
    torch.ops.shardfn.checked_counts.default,
)


def check_counts(counts: torch.Tensor, given: int, rows: int) -> None:
    """Check how many rows ranks send to each other.

    Args:
        counts: (*batch, n, n) integers on the CPU; counts[s, d] rows go from s to d.
        given: the rows that each rank has.
        rows: that each rank can take.

    Raises:
        CapacityError: a rank receives more rows than `rows`.
        ShardError: a count is negative, or a rank sends more rows than it has.
    """
    if not counts.numel():
        return
    if (least := int(counts.min())) < 0:
        *_, source, target = (counts == least).nonzero()[0].tolist()
        raise ShardError.of(
            f"{NAME}, send_counts",
            f"rank {source} of the axis sends {least} rows to rank {target}",
            needed="counts of 0 or more",
            fix="send_counts=torch.bincount(ranks, minlength=n), where ranks holds the "
            "destination of each row",
        )
    sent = _most(counts.sum(-1))
    if sent.rows > given:
        raise ShardError.of(
            f"{NAME}, send_counts",
            f"rank {sent.rank} of the axis sends {sent.rows} rows, but has {given}",
            needed=f"counts with a sum of {given} at most",
            fix="send_counts=torch.bincount(ranks, minlength=n), where ranks holds the "
            "destination of each row",
        )
    received = _most(counts.sum(-2))
    if received.rows > rows:
        raise CapacityError.of(
            f"{NAME}, rows",
            f"rank {received.rank} of the axis receives {received.rows} rows, but has room for "
            f"{rows}",
            needed=f"a bound of {received.rows} or more",
            fix=f"rows={received.rows}; or rows=None to make room for the largest possible number",
            rank=received.rank,
            received=received.rows,
            bound=rows,
        )


def rows_of_each(
    values: Sequence[torch.Tensor], counts: torch.Tensor, rows: int
) -> list[torch.Tensor]:
    """Exchange the rows of all ranks in one process.

    Args:
        values: of each rank, as `ragged_all_to_all` takes them.
        counts: (*batch, n, n) integers, which are checked.
        rows: of each result.

    Returns:
        What each rank receives.
    """
    matrix = counts.cpu()
    check_counts(matrix, _given(values[0], matrix), rows)
    *batch, n, _ = matrix.shape
    every = matrix.reshape(-1, n, n)
    flat = [x.reshape(len(every), *x.shape[len(batch) :]) for x in values]
    sent = [_sent(x, every, rank) for rank, x in enumerate(flat)]
    results = [_received(flat[0], [chunks[rank] for chunks in sent], rows) for rank in range(n)]
    return [x.reshape(*batch, *x.shape[1:]) for x in results]


def _sent(x: torch.Tensor, counts: torch.Tensor, rank: int) -> list[list[torch.Tensor]]:
    """Cut the rows of a rank into those for each rank: for each destination one tensor a batch
    element.
    """
    columns = []
    for own, sizes in zip(x, counts[:, rank].tolist(), strict=True):
        columns.append(own[: sum(sizes)].split(sizes))
    return [list(row) for row in zip(*columns, strict=True)]


def _received(
    like: torch.Tensor, chunks: Sequence[Sequence[torch.Tensor]], rows: int
) -> torch.Tensor:
    """Join the rows from each rank, which has one tensor a batch element; pad them with zeros."""
    out = like.new_zeros(len(like), rows, *like.shape[2:])
    for own, parts in zip(out, zip(*chunks, strict=True), strict=True):
        joined = torch.cat(parts)
        own[: len(joined)] = joined
    return out


class _Most(NamedTuple):
    """The first rank with the most rows."""

    rank: int
    rows: int


def _most(sums: torch.Tensor) -> _Most:
    """Find the first rank with the most rows, in any element of a batch."""
    place = int(sums.argmax())
    return _Most(place % sums.shape[-1], int(sums.flatten()[place]))


def _given(x: torch.Tensor, counts: torch.Tensor) -> int:
    """Return how many rows a rank has."""
    return x.shape[counts.dim() - 2]


def _result_shape(x: torch.Tensor, counts: torch.Tensor, rows: int) -> list[int]:
    """Return the shape of the received rows."""
    batch = counts.dim() - 2
    return [*x.shape[:batch], rows, *x.shape[batch + 1 :]]
