"""What a rank computes to send rows to the ranks of their groups, and to bring them back.

A rank counts its own rows of each group. From the counts of all ranks it knows how many rows go
from each rank to each, where the rows of its own groups end, and how the rows that come, sorted by
sender, are sorted by group.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch.fx import Node

from ...ops.experts import checked_groups as _checked_groups_op  # noqa: F401
from ...types import MeshPlacements
from .. import layout
from ..redistribute import Move
from .emit_collectives import ragged_all_to_all
from .graph_builder import Builder, LocalShard

aten = torch.ops.aten
Args = list[Any]


class OwnStep:
    """The target of a step that is no op of the program, in the plan.

    Args:
        name: of the step, in messages.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __str__(self) -> str:
        return self.__name__

    def __call__(self, *tensors: Any) -> None:
        """Do nothing: the step has a local function."""


@attrs.frozen
class Groups:
    """The groups of a mesh axis, whose ranks have a chunk of them each.

    Args:
        count: of the groups of the axis: all, or those of a rank of the outer axis with the most.
        total: of all groups.
        axis: of the mesh.
        ranks: of the axis.
        rows: that each rank can take.
        strict: whether every row must be of a group.
        may_fail: whether the rows can be too many, or of no group.
        name: of the weights of the groups, for errors.
        outer: the groups of the axis over which rows travelled before. None: the first.
    """

    count: int
    total: int
    axis: int
    ranks: int
    rows: int
    strict: bool
    may_fail: bool
    name: str
    outer: Groups | None = None

    @property
    def most_of_a_rank(self) -> int:
        """The groups of a rank with the most of them."""
        return layout.full_chunk(self.count, 1, self.ranks)

    def size(self, b: Builder) -> int:
        """Return how many groups the ranks of the axis have."""
        return self.count if self.outer is None else self.outer.own(b)

    def own(self, b: Builder) -> int:
        """Return how many groups a rank has."""
        return layout.chunk(self.size(b), 1, self.ranks, b.coordinates[self.axis])[1]

    def chunk(self, b: Builder) -> int:
        """Return how many groups the first rank of the axis has, 1 or more."""
        return max(layout.full_chunk(self.size(b), 1, self.ranks), 1)

    def start(self, b: Builder) -> Node | None:
        """Emit the number of the first group of the axis; None for 0."""
        return None if self.outer is None else self.outer.first(b)

    def first(self, b: Builder) -> Node:
        """Emit the number of the first group of a rank."""
        own = b.call(aten.mul.Tensor, b.coords[self.axis], self.chunk(b))
        start = self.start(b)
        return own if start is None else b.call(aten.add.Tensor, start, own)

    # Routes

    def counts(self, b: Builder, args: Args, kwargs: Any, shards: list[LocalShard]) -> Node:
        """Emit the counts of a rank's own sorted rows: of each group, then of none."""
        (keys,) = (shard.node for shard in shards)
        if (start := self.start(b)) is not None:
            keys = b.call(aten.sub.Tensor, keys, start)
        like = {"dtype": keys.meta["val"].dtype, "device": keys.meta["val"].device}
        edges = b.call(aten.arange.default, self.count + 1, **like)
        starts = b.call(aten.searchsorted.Tensor, keys, edges)
        first, last = (b.call(aten.slice.Tensor, starts, 0, i, i + 1) for i in (0, self.count))
        inside = b.call(
            aten.sub.Tensor,
            b.call(aten.slice.Tensor, starts, 0, 1, self.count + 1),
            b.call(aten.slice.Tensor, starts, 0, 0, self.count),
        )
        (n,) = keys.meta["val"].shape
        after = b.call(aten.rsub.Scalar, last, n)
        return b.call(aten.cat.default, [inside, b.call(aten.add.Tensor, first, after)])

    def needed(self, b: Builder, args: Args, kwargs: Any, shards: list[LocalShard]) -> Node:
        """Emit the most rows that a rank of the axis gets, with its group that gets the most of
        them (`rows * total + group`), and the rows of no group.
        """
        (every,) = (shard.node for shard in shards)
        total = b.call(aten.view.default, every, [self.ranks, self.count + 1])
        total = b.call(aten.sum.dim_IntList, total, [0])
        size, chunk = self.size(b), self.chunk(b)
        groups = b.call(aten.slice.Tensor, total, 0, 0, size)
        groups = b.call(aten.constant_pad_nd.default, groups, [0, self.ranks * chunk - size])
        by_rank = b.call(aten.view.default, groups, [self.ranks, chunk])
        like = {"dtype": torch.int64, "device": by_rank.meta["val"].device}
        first = b.call(aten.arange.start_step, 0, self.ranks * chunk, chunk, **like)
        fullest = b.call(aten.add.Tensor, b.call(aten.argmax.default, by_rank, 1), first)
        if (start := self.start(b)) is not None:
            fullest = b.call(aten.add.Tensor, fullest, start)
        rows = b.call(aten.mul.Tensor, b.call(aten.sum.dim_IntList, by_rank, [1]), self.total)
        most = b.call(aten.amax.default, b.call(aten.add.Tensor, rows, fullest), [0], True)
        outside = b.call(aten.slice.Tensor, total, 0, self.count, self.count + 1)
        return b.call(aten.cat.default, [most, outside])

    def route_on(self, b: Builder, args: Args, kwargs: Any, shards: list[LocalShard]) -> list[Node]:
        """Emit a rank's route over an axis after which rows travel on: without the ends."""
        sent, _, *rest = self.route(b, args, kwargs, shards)
        return [sent, *rest]

    def route(self, b: Builder, args: Args, kwargs: Any, shards: list[LocalShard]) -> list[Node]:
        """Emit a rank's route, of the counts of all ranks and what is needed: the rows that go
        from each rank to each, the ends of the rank's own groups, the order by group of the rows
        that come, its inverse, and the group of each row.
        """
        every, needed = (shard.node for shard in shards)
        n, size, chunk = self.ranks, self.size(b), self.chunk(b)
        every = b.call(aten.view.default, every, [n, self.count + 1])
        start = self.start(b)
        if start is None:
            start = b.call(aten.zeros_like.default, b.coords[self.axis])
        every = b.call(
            torch.ops.shardfn.checked_groups.default,
            every, needed, start, size, chunk, self.total, self.rows, self.strict, self.name,
        )  # fmt: skip
        table = b.call(aten.slice.Tensor, every, 1, 0, size)
        table = b.call(aten.constant_pad_nd.default, table, [0, n * chunk - size])
        table = b.call(aten.view.default, b.contiguous(table), [n, n, chunk])
        sent = b.call(aten.sum.dim_IntList, table, [2])
        coordinate = b.call(aten.view.default, b.coords[self.axis], [1])
        own = b.call(aten.index_select.default, table, 1, coordinate)
        by_sender = b.call(aten.view.default, own, [n * chunk])
        by_group = self._by_group(b, by_sender)
        ends = b.call(aten.cumsum.default, by_group, 0)
        starts = b.call(aten.sub.Tensor, ends, by_group)
        sender_ends = b.call(aten.cumsum.default, by_sender, 0)
        sender_starts = self._by_group(b, b.call(aten.sub.Tensor, sender_ends, by_sender))
        places = b.call(
            aten.arange.default, self.rows, dtype=torch.int64, device=ends.meta["val"].device
        )
        block = b.call(aten.searchsorted.Tensor, ends, places, right=True)
        block = b.call(aten.clamp.default, block, None, n * chunk - 1)
        shift = b.call(aten.sub.Tensor, sender_starts, starts)
        moved = b.call(aten.add.Tensor, places, b.call(aten.index_select.default, shift, 0, block))
        total = b.call(aten.sum.dim_IntList, by_sender, [0], True)
        is_row = b.call(aten.lt.Tensor, places, total)
        order = b.call(aten.where.self, is_row, moved, places)
        back = b.call(aten.scatter.src, b.call(aten.zeros_like.default, order), 0, order, places)
        group = b.call(aten.div.Tensor_mode, block, n, rounding_mode="floor")
        none = b.call(aten.full_like.default, places, self.total)
        number = b.call(aten.add.Tensor, group, self.first(b))
        groups = b.call(aten.where.self, is_row, number, none)
        return [sent, self._own_ends(b, ends), order, back, groups]

    def _by_group(self, b: Builder, x: Node) -> Node:
        """Emit a table of senders and groups, sorted by group."""
        chunk = self.chunk(b)
        table = b.call(aten.view.default, x, [self.ranks, chunk])
        turned = b.contiguous(b.call(aten.transpose.int, table, 0, 1))
        return b.call(aten.view.default, turned, [self.ranks * chunk])

    def _own_ends(self, b: Builder, ends: Node) -> Node:
        """Emit where the rows of each of a rank's groups end."""
        table = b.call(aten.view.default, ends, [self.chunk(b), self.ranks])
        last = b.call(aten.select.int, table, 1, self.ranks - 1)
        return b.contiguous(b.call(aten.slice.Tensor, last, 0, 0, self.own(b)))

    # Ops on the slices of groups

    def own_groups(
        self, b: Builder, args: Args, kwargs: Any, shards: list[LocalShard], target: Any, dim: int
    ) -> Node:
        """Emit an op that reads the slice of each row's group, or adds rows to it along a dim,
        with the numbers of a rank's own groups.
        """
        _, keys, *values = shards
        number = b.call(aten.sub.Tensor, keys.node, self.first(b))
        inside = b.call(aten.clamp.default, number, 0, max(self.own(b) - 1, 0))
        new: dict[Node, Node] = {keys.node: inside}
        if values:  # rows of no group add nothing
            (rows,) = values
            is_row = b.call(aten.eq.Tensor, number, inside)
            rest = len(rows.local_shape) - dim - 1
            is_row = b.call(aten.view.default, is_row, [self.rows, *[1] * rest])
            zero = b.call(aten.zeros_like.default, rows.node)
            new[rows.node] = b.call(aten.where.self, is_row, rows.node, zero)
        args, kwargs = torch.fx.node.map_arg((args, kwargs), lambda node: new.get(node, node))
        return b.call(target, *args, **kwargs)


# Rows that travel


def exchange(
    b: Builder,
    args: Args,
    kwargs: Any,
    shards: list[LocalShard],
    *,
    move: Move,
    rows: int,
    back: bool,
    implicit: bool,
) -> Node:
    """Emit the exchange of rows by the counts of a route, or the way back."""
    sent, counts = shards
    table = b.call(aten.transpose.int, counts.node, 0, 1) if back else counts.node
    return ragged_all_to_all(b, sent, move, implicit, table, rows)


def sort_rows(
    b: Builder, args: Args, kwargs: Any, shards: list[LocalShard], *, wrapped: int
) -> list[Node]:
    """Emit the sorted keys of a rank's own rows, the order that sorts the rows, and its inverse;
    negative keys count from the last of so many groups, unless none are wrapped.
    """
    (keys,) = (shard.node for shard in shards)
    if wrapped:
        from_last = b.call(aten.add.Tensor, keys, wrapped)
        keys = b.call(aten.where.self, b.call(aten.lt.Scalar, keys, 0), from_last, keys)
    both = b.call(aten.sort.stable, keys, stable=True)
    in_order, order = b.item(both, 0), b.item(both, 1)
    (n,) = keys.meta["val"].shape
    places = b.call(aten.arange.default, n, dtype=torch.int64, device=keys.meta["val"].device)
    back = b.call(aten.scatter.src, b.call(aten.zeros_like.default, order), 0, order, places)
    return [in_order, order, back]


def rows_first(
    b: Builder, args: Args, kwargs: Any, shards: list[LocalShard], *, dim: int, most: int
) -> Node:
    """Emit rows along the first dim, contiguous, padded to those of a rank with the most; in an
    order, if there is one.
    """
    x, *order = (shard.node for shard in shards)
    rows = _in_order(b, _moved(b, x, dim, 0), order)
    shape = rows.meta["val"].shape
    if shape[0] < most:
        pads = [0] * (2 * len(shape) - 1)
        rows = b.call(aten.constant_pad_nd.default, rows, [*pads, most - shape[0]])
    return b.contiguous(rows)


def by_group(b: Builder, args: Args, kwargs: Any, shards: list[LocalShard], *, dim: int) -> Node:
    """Emit rows that came from all senders, sorted by group, along a dim."""
    came, order = (shard.node for shard in shards)
    return _moved(b, b.call(aten.index_select.default, came, 0, order), 0, dim)


def by_sender(b: Builder, args: Args, kwargs: Any, shards: list[LocalShard], *, dim: int) -> Node:
    """Emit rows of groups in the order of their senders, along the first dim."""
    rows, back = (shard.node for shard in shards)
    return b.call(aten.index_select.default, _moved(b, rows, dim, 0), 0, back)


def of_tokens(
    b: Builder,
    args: Args,
    kwargs: Any,
    shards: list[LocalShard],
    *,
    dim: int,
    shape: tuple[int, ...],
    placements: MeshPlacements,
) -> Node:
    """Emit the rows that a rank has, without the padding to those of a rank with the most; in an
    order, if there is one.
    """
    came, *order = (shard.node for shard in shards)
    own = b.local_shape(shape, placements)[dim]
    rows = came if own == came.meta["val"].shape[0] else b.call(aten.slice.Tensor, came, 0, 0, own)
    return _moved(b, _in_order(b, rows, order), 0, dim)


def _in_order(b: Builder, rows: Node, order: list[Node]) -> Node:
    """Emit rows in an order, if there is one."""
    return b.call(aten.index_select.default, rows, 0, order[0]) if order else rows


def cast(
    b: Builder, args: Args, kwargs: Any, shards: list[LocalShard], *, dtype: torch.dtype
) -> Node:
    """Emit places in another dtype."""
    return b.call(aten._to_copy.default, shards[0].node, dtype=dtype)


def _moved(b: Builder, x: Node, source: int, target: int) -> Node:
    """Emit a value with one dim moved."""
    if source == target:
        return x
    order = list(range(x.meta["val"].dim()))
    order.insert(target, order.pop(source))
    return b.call(aten.permute.default, x, order)
