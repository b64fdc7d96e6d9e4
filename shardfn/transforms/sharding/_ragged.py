"""`ragged_all_to_all`: send rows to other ranks or samples, with the numbers of rows in a tensor.

Dynamo reads this.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import _compat
from ...capture.shard_map import axis_names
from ...errors import PlacementError
from ...ops import shard_map
from ...ops.ragged import checked_counts
from ...row_bounds import row_bound
from .._paired import numbers
from ._axis_names import (
    AxisName,
    Names,
    chosen,
    count,
    leafwise,
    linear_index,
    mesh_axes,
    stacked,
    tensor,
)

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
BOUNDS = (
    'rows=64 for 64 rows; rows="1.5x" for 1.5 times the rows of x, rounded up; rows=None for '
    "the largest possible number, the rows of x of all ranks together"
)


def ragged_all_to_all(
    x: Any, send_counts: Any, axis_name: AxisName, *, rows: int | str | None = None
) -> tuple[Any, torch.Tensor]:
    """Send the first `send_counts[0]` rows of x to rank 0, the next `send_counts[1]` rows to rank
    1, and so on.

    The counts are tensor values, which may differ between ranks and from call to call. An
    all-gather first gives each rank the counts of all ranks. If more than `rows` rows would arrive
    at a rank, all ranks raise an error before any row is sent, so no row is dropped.

    Args:
        x: a tensor (N, ...), or a pytree of such tensors, with rows in the order of their
            destinations. Rows of x after the first `sum(send_counts)` rows are not sent.
        send_counts: an integer tensor (n,) with the number of rows for each of the n ranks or
            samples. The sum of the counts is at most N, the number of rows of x. To avoid the
            all-gather of the counts, `send_counts` may be an (n, n) tensor, equal on all ranks, in
            which row i holds the counts of sender i.
        axis_name: an axis name, or a tuple of axis names in which the first axis varies slowest.
            With a tuple of axis names, `ragged_all_to_all` is implemented as an all-gather, which
            sends more bytes. See `psum`.
        rows: the number of rows that each rank can receive, or text such as "1.5x", which means 1.5
            times the N rows of x, rounded up. By default, `rows` is n * N, the largest number of
            rows that can arrive from n ranks with N rows each.

    Returns:
        A tuple of the received rows and their counts. The received rows, (rows, ...), are in the
        order of their senders, followed by zeros. The returned counts, (n,) int64, are the numbers
        of rows received from each rank or sample.

    Raises:
        CaptureError: no enclosing `shard_map` or `vmap` defines the axis name.
        PlacementError: the counts have a wrong shape or dtype, x has no rows, or `rows` is not a
            number of rows.
        CapacityError: more rows than `rows` would arrive at a rank. Every rank of the axis raises
            the CapacityError when the program runs.
        ShardError: when the program runs, a count is negative, or the sum of a rank's counts
            exceeds the number of its rows.

    Source: jax.lax.ragged_all_to_all.

    Example:
        >>> import torch, shardfn as sf
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> counts = torch.tensor([[0, 2], [1, 1]])  # sample 0 sends both rows to sample 1
        >>> send = lambda x, counts: ragged_all_to_all(x, counts, "i", rows=3)
        >>> sf.vmap(send, axis_name="i")(x, counts)
        (tensor([[3., 0., 0.],
                [1., 2., 4.]]), tensor([[0, 1],
                [2, 1]]))
    """
    names = axis_names.bindings_of("ragged_all_to_all", axis_name)
    text = ", ".join([b[0] for b in names])
    every = _of_all(_counts(send_counts, count(names), text).long(), names)  # (n, n)
    received = leafwise(lambda leaf: _exchanged(tensor(leaf), every, names, text, rows), x)
    return received, chosen(every, 1, linear_index(names)).squeeze(1)


def _counts(send_counts: Any, n: int, names: str) -> torch.Tensor:
    """Return the counts as a tensor, which is checked."""
    if isinstance(send_counts, torch.Tensor):
        check_send_counts((numbers(send_counts), send_counts.dtype), n, names)
        return send_counts
    if not isinstance(send_counts, (list, tuple)):
        check_send_counts(type(send_counts).__name__, n, names)
    return _counts(torch.tensor(send_counts), n, names)


def _of_all(counts: torch.Tensor, names: Names) -> torch.Tensor:
    """Return the counts of all ranks or samples: gathered, or as they are given."""
    if counts.dim() == 1:
        return stacked(counts, names)
    if _is_one_mesh_axis(names):
        return shard_map.as_invariant(counts, mesh_axes(names), where=shard_map.COUNTS_OF_ALL)
    return stacked(chosen(counts, 0, linear_index(names)).squeeze(0), names)


def _is_one_mesh_axis(names: Names) -> bool:
    return len(names) == 1 and names[0][2] == axis_names.MESH


def _exchanged(
    x: torch.Tensor, every: torch.Tensor, names: Names, text: str, rows: int | str | None
) -> torch.Tensor:
    n = count(names)
    shape = numbers(x)
    bound = rows_bound(shape, n, rows, text)
    given = shape[0]
    if _is_one_mesh_axis(names):
        return shard_map.ragged_all_to_all(x, every, names[0][0], n, given, bound)
    return _selected(stacked(x, names), checked_counts(every, given, bound), names, bound)


def _selected(x: torch.Tensor, counts: torch.Tensor, names: Names, rows: int) -> torch.Tensor:
    """Select the rows that come to this rank or sample from those of all.

    Args:
        x: (n, N, ...), the rows of all.
        counts: (n, n), which are checked.
        names: of the axes.
        rows: of the result.
    """
    n, given = x.shape[:2]
    index = linear_index(names)
    own = chosen(counts, 1, index).squeeze(1)  # (n,), from each sender
    starts = chosen(counts.cumsum(1) - counts, 1, index).squeeze(1)  # (n,), in its rows
    ends = own.cumsum(0)  # (n,), in the result
    places = torch.arange(rows, device=x.device)
    senders = (places.unsqueeze(1) >= ends).sum(1)  # (rows,); n where no row comes
    is_row = (senders < n).reshape(rows, *[1] * (x.dim() - 2))
    senders = senders.clamp(max=n - 1)
    offsets = places - (ends - own).index_select(0, senders)
    from_row = starts.index_select(0, senders) + offsets
    flat = torch.cat([x.flatten(0, 1), x.new_zeros(1, *x.shape[2:])])
    numbered = (senders * given + from_row).clamp(max=n * given)
    return torch.where(is_row, flat.index_select(0, numbered), torch.zeros_like(flat[:1]))


@_compat.constant_in_graph
def check_send_counts(kind: tuple[tuple[int, ...], torch.dtype] | str, n: int, names: str) -> None:
    """Check the counts: the shape and the dtype of a tensor, or the name of another type.

    Raises:
        PlacementError: they are not n integers.
    """
    if not isinstance(kind, str) and kind[0] in ((n,), (n, n)) and kind[1] in INTEGERS:
        return
    raise PlacementError.of(
        f"ragged_all_to_all over {names}, send_counts",
        f"got {kind}" if isinstance(kind, str) else f"got shape {kind[0]}, {kind[1]}",
        needed=f"shape ({n},), torch.int64: the number of rows for each of {n} ranks; or "
        f"shape ({n}, {n}) with the counts of all ranks",
        fix=f"torch.bincount(destinations, minlength={n}), where destinations holds the target "
        "rank of each row",
    )


@_compat.constant_in_graph
def rows_bound(shape: tuple[int, ...], n: int, rows: int | str | None, names: str) -> int:
    """Return how many rows each rank or sample can take.

    Raises:
        PlacementError: x has no rows, or the bound is no number of rows.
    """
    where = f"ragged_all_to_all over {names}"
    if not shape:
        raise PlacementError.of(
            f"{where}, x",
            "a tensor without dims",
            needed="a tensor whose dim 0 counts the rows",
            fix="x.reshape(1)",
        )
    if rows is None:
        return n * shape[0]
    bound = row_bound(rows, shape[0])
    if not bound:
        got = "a tensor" if isinstance(rows, torch.Tensor) else repr(rows)
        raise PlacementError.of(
            f"{where}, rows",
            f"got {got}, and x has {shape[0]} rows",
            needed="1 row or more",
            fix=BOUNDS,
        )
    return bound
