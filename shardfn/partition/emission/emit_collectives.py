"""The moves of a redistribution as ops of a local graph."""

from __future__ import annotations

import math

import attrs
import torch

from ...collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    HALO,
    PPERMUTE,
    RAGGED_ALL_TO_ALL,
    REDUCE_SCATTER,
    implement,
)
from ...ops.halo import halo as _halo_op  # noqa: F401
from ...ops.permute import permute as _permute_op  # noqa: F401
from ...ops.ragged import checked_counts as _checked_counts_op  # noqa: F401
from ...ops.ragged import ragged_all_to_all as _ragged_op  # noqa: F401
from ...types import Collective, MeshPlacements
from .. import layout, strided_shards
from ..collective_bytes import nbytes
from ..redistribute import SLICE, Move
from ..rules.dtypes import COMPUTED, INTEGERS
from . import wire_dtypes
from .graph_builder import Builder, LocalShard

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def apply_move(b: Builder, shard: LocalShard, move: Move, implicit: bool) -> LocalShard:
    """Emit the ops of one redistribution step into a rank's graph."""
    emit = cut if move.kind == SLICE else move.collective.emit
    assert emit is not None, f"{move.kind} cannot be emitted"
    dtype = shard.node.meta["val"].dtype
    if dtype not in COMPUTED:  # torch has no kernels that pad and copy some
        moved = b.call(aten.view.dtype, shard.node, INTEGERS[dtype.itemsize])
        shard = attrs.evolve(shard, node=moved)
    node = emit(b, shard, move, implicit)
    node = b.restride(node, shard.shape, shard.stride)
    if dtype not in COMPUTED:
        node = b.call(aten.view.dtype, node, dtype)
    shape = _shape(node)
    local = b.local_shape(shard.shape, move.after)
    assert tuple(shape) == local, (move, shape, local)
    node.meta["type"] = (shard.shape, move.after)
    return LocalShard(node, shard.shape, shard.stride, move.after, local)


def _shape(x: torch.fx.Node) -> torch.Size:
    """Return the shape of a node's fake tensor."""
    return x.meta["val"].shape


def _ranks(b: Builder, move: Move) -> int:
    """Return the number of ranks along the axis of a move."""
    return b.axes.sizes[move.axis]


def _communicate(
    b: Builder, shard: LocalShard, move: Move, implicit: bool, x: torch.fx.Node, *constants: object
) -> torch.fx.Node:
    """Emit a collective and its wait, in a dtype that the backend carries. Returns the received
    value.

    Args:
        b: the builder of the local graph.
        shard: the value that is redistributed.
        move: the move, with its collective and its axis.
        implicit: whether no placement of the user asks for it.
        x: the payload, contiguous.
        constants: the op's arguments between the payload and the group name.
    """
    kind = move.collective
    sent, back = wire_dtypes.packed(b, x, reduces=kind.reduces)
    if kind.counts_elements:  # regardless of their shape
        (count,) = constants
        assert isinstance(count, int)
        width = _shape(sent).numel() // max(_shape(x).numel(), 1)
        sent = _flat(b, sent)
        constants = (count * width,)
    group = b.group_names[move.axis]
    start = b.call(kind.overload, sent, *constants, group)
    start.meta["collective"] = _record(b, shard, move, implicit)
    received = b.call(c10d.wait_tensor.default, start)
    return back(received)


def _record(b: Builder, shard: LocalShard, move: Move, implicit: bool) -> Collective:
    """Make the `Collective` record of an emitted collective: kind, axis, bytes, source line."""
    kind = move.collective
    itemsize = shard.node.meta["val"].dtype.itemsize
    op = str(move.before[move.axis]) if kind.reduces else None
    return Collective(
        kind=kind.name,
        axis=b.axes.names[move.axis],
        nbytes=nbytes(shard.shape, itemsize, move, b.axes, b.coordinates),
        op=op,
        name=str(b.about.get("origin", "")),
        source=b.about.get("source"),
        implicit=implicit,
        module=b.about.get("module"),
    )


def _opened(
    b: Builder, shard: LocalShard, move: Move, placements: MeshPlacements
) -> strided_shards.Open:
    """Describe how the axis of a move shards its dim, before or after the move."""
    return strided_shards.opened(shard.shape, placements, move.axis, b.axes.sizes, b.coordinates)


def _open(b: Builder, x: torch.fx.Node, cut: strided_shards.Open, size: int) -> torch.fx.Node:
    """View a dim as three (outer, sharded, inner), so that a strided shard is a plain shard of
    the middle one.
    """
    if cut.is_dim:
        return x
    shape = list(_shape(x))
    three = [cut.outer, size, cut.inner]
    opened_shape = [*shape[: cut.dim], *three, *shape[cut.dim + 1 :]]
    return b.call(aten.view.default, b.contiguous(x), opened_shape)


def _closed(b: Builder, x: torch.fx.Node, shard: LocalShard, move: Move) -> torch.fx.Node:
    """View the three dims as one again."""
    local_shape = b.local_shape(shard.shape, move.after)
    if tuple(_shape(x)) == local_shape:
        return x
    return b.call(aten.view.default, b.contiguous(x), list(local_shape))


def _turned(b: Builder, x: torch.fx.Node, cut: strided_shards.Open, n: int) -> torch.fx.Node:
    """Reverse the order of the chunks in every second run of an opened zigzag, which makes it a
    strided shard; and back.
    """
    if not cut.turns:
        return x
    shape = list(_shape(x))
    pairs = [cut.outer // 2, 2, n, cut.size // n]
    opened_shape = [*shape[: cut.dim], *pairs, *shape[cut.dim + 2 :]]
    runs = b.call(aten.view.default, b.contiguous(x), opened_shape)
    there = b.call(aten.slice.Tensor, runs, cut.dim + 1, 0, 1)
    back = b.call(aten.slice.Tensor, runs, cut.dim + 1, 1, 2)
    back = b.call(aten.flip.default, back, [cut.dim + 2])
    turned = b.call(aten.cat.default, [there, back], cut.dim + 1)
    return b.call(aten.view.default, turned, shape)


def _place(cut: strided_shards.Open) -> int:
    """Return the index of the sharded dim after `_open`."""
    return cut.dim if cut.is_dim else cut.dim + 1


def _chunk_size(b: Builder, move: Move, cut: strided_shards.Open) -> int:
    """Return the size of this rank's chunk along the sharded dim."""
    coordinate = b.coordinates[move.axis]
    _, mine = layout.chunk(cut.size, cut.unit, _ranks(b, move), coordinate)
    return mine


def _padded(b: Builder, x: torch.fx.Node, dim: int, size: int) -> torch.fx.Node:
    """Pad a dim with zeros at its end, so that uneven chunks are sent as equal ones."""
    shape = _shape(x)
    missing = size - shape[dim]
    if not missing:
        return x
    later_dims = len(shape) - 1 - dim
    pads = [0, 0] * later_dims + [0, missing]
    return b.call(aten.constant_pad_nd.default, x, pads)


def _first(b: Builder, x: torch.fx.Node, dim: int, size: int) -> torch.fx.Node:
    """Slice the first elements of a dim, which drops padding."""
    if _shape(x)[dim] == size:
        return x
    return b.call(aten.slice.Tensor, x, dim, 0, size)


def _split_dim(b: Builder, x: torch.fx.Node, dim: int, n: int) -> torch.fx.Node:
    """Split a dim into one contiguous chunk per rank: (.., n * m, ..) -> (n, .., m, ..)."""
    shape = list(_shape(x))
    split_shape = [*shape[:dim], n, shape[dim] // n, *shape[dim + 1 :]]
    parts = b.call(aten.view.default, b.contiguous(x), split_shape)  # (.., n, m, ..)
    others = [d for d in range(len(split_shape)) if d != dim]
    chunks = b.call(aten.permute.default, parts, [dim, *others])  # (n, .., m, ..)
    return b.contiguous(chunks)


def _join_dim(b: Builder, x: torch.fx.Node, dim: int) -> torch.fx.Node:
    """Join the chunks of all ranks along a dim: (n, .., m, ..) -> (.., n * m, ..)."""
    n, *shape = _shape(x)
    after_dim = range(dim + 1, len(shape) + 1)
    order = [*range(1, dim + 1), 0, *after_dim]
    parts = b.call(aten.permute.default, x, order)  # (.., n, m, ..)
    joined_shape = [*shape[:dim], n * shape[dim], *shape[dim + 1 :]]
    return b.call(aten.view.default, b.contiguous(parts), joined_shape)


def _flat(b: Builder, x: torch.fx.Node) -> torch.fx.Node:
    """Flatten a value to one dim, since collectives split and count along dim 0."""
    flat_shape = [-1] if _shape(x).numel() else [0]
    return b.call(aten.view.default, b.contiguous(x), flat_shape)


def gather(b: Builder, shard: LocalShard, move: Move, implicit: bool) -> torch.fx.Node:
    """Emit an all-gather: pad chunks to the full size, join them, drop the padding."""
    cut = _opened(b, shard, move, move.before)
    dim = _place(cut)
    n = _ranks(b, move)
    full = layout.full_chunk(cut.size, cut.unit, n)
    x = _open(b, shard.node, cut, _chunk_size(b, move, cut))
    x = _padded(b, x, dim, full)
    shape = list(_shape(x))
    flat = _flat(b, x)
    received = _communicate(b, shard, move, implicit, flat, n)
    chunks = b.call(aten.view.default, received, [n, *shape])
    padded = _join_dim(b, chunks, dim)
    out = _first(b, padded, dim, cut.size)
    out = _turned(b, out, cut, n)
    return _closed(b, out, shard, move)


def cut(b: Builder, shard: LocalShard, move: Move, implicit: bool) -> torch.fx.Node:
    """Emit the local slice that turns a replicated value into this rank's shard. Nothing is
    sent.
    """
    own = _opened(b, shard, move, move.after)
    mine = _chunk_size(b, move, own)
    device = shard.node.meta["val"].device
    steps = b.call(aten.arange.default, mine, dtype=torch.int64, device=device)
    start = b.start(move.axis, own.size, own.unit)
    rows = b.call(aten.add.Tensor, steps, start)
    if own.turns:  # a pair of runs is one, of which a rank has a chunk at either end
        end = b.call(aten.rsub.Scalar, start, 2 * own.size - mine)
        back = b.call(aten.add.Tensor, steps, end)
        rows = b.call(aten.cat.default, [rows, back])
        own = attrs.evolve(own, outer=own.outer // 2, size=2 * own.size)
    x = _open(b, shard.node, own, own.size)
    out = b.call(aten.index_select.default, x, _place(own), rows)
    return _closed(b, out, shard, move)


def reduce(b: Builder, shard: LocalShard, move: Move, implicit: bool) -> torch.fx.Node:
    """Emit an all-reduce."""
    op = str(move.before[move.axis])
    x = b.contiguous(shard.node)
    return _communicate(b, shard, move, implicit, x, op)


def reduce_scatter(b: Builder, shard: LocalShard, move: Move, implicit: bool) -> torch.fx.Node:
    """Emit a reduce-scatter along a dim."""
    op = str(move.before[move.axis])
    cut = _opened(b, shard, move, move.after)
    dim = _place(cut)
    n = _ranks(b, move)
    full = layout.full_chunk(cut.size, cut.unit, n)
    x = _open(b, shard.node, cut, cut.size)
    x = _turned(b, x, cut, n)
    padded = _padded(b, x, dim, full * n)
    chunks = _split_dim(b, padded, dim, n)
    _, *shape = _shape(chunks)
    flat = _flat(b, chunks)
    received = _communicate(b, shard, move, implicit, flat, op, n)
    out = b.call(aten.view.default, received, shape)
    out = _first(b, out, dim, _chunk_size(b, move, cut))
    return _closed(b, out, shard, move)


def all_to_all(b: Builder, shard: LocalShard, move: Move, implicit: bool) -> torch.fx.Node:
    """Emit an all-to-all that moves the sharding from one dim to another."""
    src = _opened(b, shard, move, move.before)
    dst = _opened(b, shard, move, move.after)
    n = _ranks(b, move)
    src_full = layout.full_chunk(src.size, src.unit, n)
    dst_full = layout.full_chunk(dst.size, dst.unit, n)
    x, src_dim, dst_dim = _opened_twice(b, shard.node, move, src, dst)
    x = _turned(b, x, attrs.evolve(dst, dim=dst_dim - 1), n)
    x = _padded(b, x, src_dim, src_full)
    x = _padded(b, x, dst_dim, dst_full * n)
    chunks = _split_dim(b, x, dst_dim, n)
    shape = _shape(chunks)
    lengths = [shape.numel() // n] * n
    flat = _flat(b, chunks)
    received = _communicate(b, shard, move, implicit, flat, lengths, lengths)
    out = b.call(aten.view.default, received, list(shape))
    out = _join_dim(b, out, src_dim)
    out = _first(b, out, src_dim, src.size)
    out = _first(b, out, dst_dim, _chunk_size(b, move, dst))
    out = _turned(b, out, attrs.evolve(src, dim=src_dim - 1), n)
    return _closed(b, out, shard, move)


def _opened_twice(
    b: Builder, x: torch.fx.Node, move: Move, src: strided_shards.Open, dst: strided_shards.Open
) -> tuple[torch.fx.Node, int, int]:
    """View the gathered dim and the newly sharded dim as three each. Returns the value and the
    two dims.
    """
    sides = [(src, _chunk_size(b, move, src)), (dst, dst.size)]
    for side, size in sorted(sides, key=lambda s: -s[0].dim):
        x = _open(b, x, side, size)
    return (x, _place(src) + _inserted(dst, src), _place(dst) + _inserted(src, dst))


def _inserted(other: strided_shards.Open, own: strided_shards.Open) -> int:
    """Count the dims that opening another dim inserts before this one."""
    return 2 if other.dim < own.dim and not other.is_dim else 0


def halo(b: Builder, shard: LocalShard, move: Move, implicit: bool) -> torch.fx.Node:
    """Emit a halo exchange: put the neighbours' edge rows around a rank's chunk."""
    placement = move.after[move.axis]
    x = shard.node
    n = _ranks(b, move)
    dim, unit = layout.dim_and_unit(placement)
    widths = layout.halo(placement)
    if n == 1:
        later_dims = len(shard.shape) - 1 - dim
        pads = [0, 0] * later_dims + [*widths]
        return b.call(aten.constant_pad_nd.default, x, pads)
    size = layout.full_chunk(shard.shape[dim], unit, n)
    padded = _padded(b, x, dim, size)
    first, last = _edges(b, padded, dim, widths)
    sent = b.call(aten.cat.default, [first, last])
    count = _shape(last).numel()
    received = _communicate(b, shard, move, implicit, sent, count)
    if not _shape(x)[dim]:
        return x
    return _between(b, x, received, dim, widths)


def _edges(
    b: Builder, x: torch.fx.Node, dim: int, halo: tuple[int, int]
) -> tuple[torch.fx.Node, torch.fx.Node]:
    """Return the flat edge rows that a rank sends to its previous and its next neighbour."""
    before, after = halo
    size = _shape(x)[dim]
    first = b.call(aten.slice.Tensor, x, dim, 0, after)
    first = _flat(b, first)
    last = b.call(aten.slice.Tensor, x, dim, size - before, size)
    last = _flat(b, last)
    return first, last


def _between(
    b: Builder, x: torch.fx.Node, received: torch.fx.Node, dim: int, halo: tuple[int, int]
) -> torch.fx.Node:
    """Concatenate the received edge rows around a chunk."""
    shape = _shape(x)
    start = 0
    edges: list[torch.fx.Node] = []
    for rows in halo:
        edge_shape = [*shape[:dim], rows, *shape[dim + 1 :]]
        end = start + math.prod(edge_shape)
        edge = b.call(aten.slice.Tensor, received, 0, start, end)
        edge = b.call(aten.view.default, edge, edge_shape)
        edges.append(edge)
        start = end
    before, after = edges
    return b.call(aten.cat.default, [before, x, after], dim)


def ppermute(b: Builder, shard: LocalShard, move: Move, implicit: bool) -> torch.fx.Node:
    """Emit a permute: each rank sends its value to another; ranks without a source get zeros."""
    x = b.contiguous(shard.node)
    if _ranks(b, move) == 1:
        return x if move.perm else b.call(aten.zeros_like.default, x)
    sources = [s for s, _ in move.perm]
    targets = [t for _, t in move.perm]
    flat = _flat(b, x)
    received = _communicate(b, shard, move, implicit, flat, sources, targets)
    shape = list(_shape(x))
    return b.call(aten.view.default, received, shape)


def ragged_all_to_all(
    b: Builder, shard: LocalShard, move: Move, implicit: bool, counts: torch.fx.Node, rows: int
) -> torch.fx.Node:
    """Emit an exchange of rows by counts.

    Args:
        b: the builder of the local graph.
        shard: the rows of a rank, (*batch, N, ...).
        move: of kind RAGGED_ALL_TO_ALL, with the mesh axis.
        implicit: whether no code of the user asks for it.
        counts: (*batch, n, n) int64, equal on all ranks of the axis.
        rows: of the result.

    Returns:
        The received rows, (*batch, rows, ...).
    """
    x = b.contiguous(shard.node)
    counts = b.contiguous(counts)
    batch = _shape(counts)[:-2]
    local = [*batch, rows, *_shape(x)[len(batch) + 1 :]]
    if _ranks(b, move) == 1:
        return _rows_of_one(b, x, counts, local)
    received = _communicate(b, shard, move, implicit, x, counts, rows)
    return received if list(_shape(received)) == local else _viewed(b, received, local)


def _viewed(b: Builder, x: torch.fx.Node, shape: list[int]) -> torch.fx.Node:
    """View a contiguous value in another shape."""
    return b.call(aten.view.default, x, shape)


def _rows_of_one(
    b: Builder, x: torch.fx.Node, counts: torch.fx.Node, shape: list[int]
) -> torch.fx.Node:
    """Emit the exchange of a rank that is alone on the axis: its own rows, and zeros."""
    batch = _shape(counts)[:-2]
    dim = len(batch)
    given, rows = _shape(x)[dim], shape[dim]
    checked = b.call(torch.ops.shardfn.checked_counts.default, counts, given, rows)
    sizes = _viewed(b, checked, [*batch, 1])
    places = b.call(aten.arange.default, rows, dtype=torch.int64, device=counts.meta["val"].device)
    is_row = b.call(aten.lt.Tensor, places, sizes)
    is_row = _viewed(b, is_row, [*batch, rows, *[1] * (len(shape) - dim - 1)])
    padded = _padded(b, _first(b, x, dim, min(rows, given)), dim, rows)
    like = {"dtype": x.meta["val"].dtype, "device": x.meta["val"].device}
    zero = b.call(aten.full.default, [], 0, **like)
    return b.call(aten.where.self, is_row, padded, zero)


implement(ALL_GATHER, emit=gather)
implement(ALL_REDUCE, emit=reduce)
implement(REDUCE_SCATTER, emit=reduce_scatter)
implement(ALL_TO_ALL, emit=all_to_all)
implement(HALO, emit=halo)
implement(PPERMUTE, emit=ppermute)
implement(RAGGED_ALL_TO_ALL, emit=ragged_all_to_all)
