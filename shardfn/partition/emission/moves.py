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
    REDUCE_SCATTER,
    implement,
)
from ...ops.halo import halo as _halo_op  # noqa: F401
from ...ops.permute import permute as _permute_op  # noqa: F401
from ...types import Collective, Marks
from .. import layout, strided
from ..payload import nbytes
from ..redistribute import SLICE, Move
from ..rules.dtypes import COMPUTED, INTEGERS
from . import wire
from .builder import Builder, Piece

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def apply_move(b: Builder, piece: Piece, move: Move, implicit: bool) -> Piece:
    """Emit one move."""
    emit = cut if move.kind == SLICE else move.collective.emit
    assert emit is not None, f"{move.kind} cannot be emitted"
    dtype = piece.node.meta["val"].dtype
    if dtype not in COMPUTED:  # torch has no kernels that pad and copy some
        moved = b.call(aten.view.dtype, piece.node, INTEGERS[dtype.itemsize])
        piece = attrs.evolve(piece, node=moved)
    node = emit(b, piece, move, implicit)
    node = b.restride(node, piece.shape, piece.stride)
    if dtype not in COMPUTED:
        node = b.call(aten.view.dtype, node, dtype)
    shape = _shape(node)
    local = b.local_shape(piece.shape, move.after)
    assert tuple(shape) == local, (move, shape, local)
    node.meta["type"] = (piece.shape, move.after)
    return Piece(node, piece.shape, piece.stride, move.after, local)


def _shape(x: torch.fx.Node) -> torch.Size:
    return x.meta["val"].shape


def _ranks(b: Builder, move: Move) -> int:
    """The number of ranks along the axis of a move."""
    return b.axes.sizes[move.axis]


def _communicate(
    b: Builder, piece: Piece, move: Move, implicit: bool, x: torch.fx.Node, *constants: object
) -> torch.fx.Node:
    """Start the collective of a move and wait for it. Returns the received value.

    Args:
        b: the builder of the local graph.
        piece: the value that is redistributed.
        move: the move, with its collective and its axis.
        implicit: whether no placement of the user asks for it.
        x: the payload, contiguous.
        constants: the op's arguments between the payload and the group name.
    """
    kind = move.collective
    sent, back = wire.packed(b, x, reduces=kind.reduces)
    if kind.counts_elements:  # regardless of their shape
        (count,) = constants
        assert isinstance(count, int)
        width = _shape(sent).numel() // max(_shape(x).numel(), 1)
        sent = _flat(b, sent)
        constants = (count * width,)
    group = b.group_names[move.axis]
    start = b.call(kind.overload, sent, *constants, group)
    start.meta["collective"] = _record(b, piece, move, implicit)
    received = b.call(c10d.wait_tensor.default, start)
    return back(received)


def _record(b: Builder, piece: Piece, move: Move, implicit: bool) -> Collective:
    kind = move.collective
    itemsize = piece.node.meta["val"].dtype.itemsize
    op = str(move.before[move.axis]) if kind.reduces else None
    return Collective(
        kind=kind.name,
        axis=b.axes.names[move.axis],
        nbytes=nbytes(piece.shape, itemsize, move, b.axes, b.coordinates),
        op=op,
        name=str(b.about.get("origin", "")),
        source=b.about.get("source"),
        implicit=implicit,
    )


def _opened(b: Builder, piece: Piece, move: Move, marks: Marks) -> strided.Open:
    """How the axis of a move shards its dim, at one of its placements."""
    return strided.opened(piece.shape, marks, move.axis, b.axes.sizes, b.coordinates)


def _open(b: Builder, x: torch.fx.Node, cut: strided.Open, size: int) -> torch.fx.Node:
    """A value with its dim, of which the axis has so many elements, viewed as three."""
    if cut.is_dim:
        return x
    shape = list(_shape(x))
    three = [cut.outer, size, cut.inner]
    opened_shape = [*shape[: cut.dim], *three, *shape[cut.dim + 1 :]]
    return b.call(aten.view.default, b.contiguous(x), opened_shape)


def _closed(b: Builder, x: torch.fx.Node, piece: Piece, move: Move) -> torch.fx.Node:
    """A value whose opened dims are one again."""
    local_shape = b.local_shape(piece.shape, move.after)
    if tuple(_shape(x)) == local_shape:
        return x
    return b.call(aten.view.default, b.contiguous(x), list(local_shape))


def _place(cut: strided.Open) -> int:
    """The number of the sharded dim of an opened value."""
    return cut.dim if cut.is_dim else cut.dim + 1


def _own_size(b: Builder, move: Move, cut: strided.Open) -> int:
    """The size of this rank's chunk of a dim."""
    coordinate = b.coordinates[move.axis]
    _, mine = layout.chunk(cut.size, cut.unit, _ranks(b, move), coordinate)
    return mine


def _padded(b: Builder, x: torch.fx.Node, dim: int, size: int) -> torch.fx.Node:
    """Pad with zeros at the end of a dim, so that chunks of unequal size are sent as equal
    ones.
    """
    shape = _shape(x)
    missing = size - shape[dim]
    if not missing:
        return x
    dims_behind = len(shape) - 1 - dim
    pads = [0, 0] * dims_behind + [0, missing]
    return b.call(aten.constant_pad_nd.default, x, pads)


def _first(b: Builder, x: torch.fx.Node, dim: int, size: int) -> torch.fx.Node:
    if _shape(x)[dim] == size:
        return x
    return b.call(aten.slice.Tensor, x, dim, 0, size)


def _split_dim(b: Builder, x: torch.fx.Node, dim: int, n: int) -> torch.fx.Node:
    """(.., n * m, ..) -> contiguous (n, .., m, ..): the chunks for the ranks, in order."""
    shape = list(_shape(x))
    split_shape = [*shape[:dim], n, shape[dim] // n, *shape[dim + 1 :]]
    parts = b.call(aten.view.default, b.contiguous(x), split_shape)  # (.., n, m, ..)
    others = [d for d in range(len(split_shape)) if d != dim]
    chunks = b.call(aten.permute.default, parts, [dim, *others])  # (n, .., m, ..)
    return b.contiguous(chunks)


def _join_dim(b: Builder, x: torch.fx.Node, dim: int) -> torch.fx.Node:
    """(n, .., m, ..) -> (.., n * m, ..)."""
    n, *shape = _shape(x)
    after_dim = range(dim + 1, len(shape) + 1)
    order = [*range(1, dim + 1), 0, *after_dim]
    parts = b.call(aten.permute.default, x, order)  # (.., n, m, ..)
    joined_shape = [*shape[:dim], n * shape[dim], *shape[dim + 1 :]]
    return b.call(aten.view.default, b.contiguous(parts), joined_shape)


def _flat(b: Builder, x: torch.fx.Node) -> torch.fx.Node:
    """Move the dim to the front. Collectives split dim 0, so it must exist and hold full
    chunks.
    """
    flat_shape = [-1] if _shape(x).numel() else [0]
    return b.call(aten.view.default, b.contiguous(x), flat_shape)


def gather(b: Builder, piece: Piece, move: Move, implicit: bool) -> torch.fx.Node:
    """All-gather: pad chunks to the full size, join them, and remove the padding at the end."""
    cut = _opened(b, piece, move, move.before)
    dim = _place(cut)
    n = _ranks(b, move)
    full = layout.full_chunk(cut.size, cut.unit, n)
    x = _open(b, piece.node, cut, _own_size(b, move, cut))
    x = _padded(b, x, dim, full)
    shape = list(_shape(x))
    flat = _flat(b, x)
    received = _communicate(b, piece, move, implicit, flat, n)
    chunks = b.call(aten.view.default, received, [n, *shape])
    padded = _join_dim(b, chunks, dim)
    out = _first(b, padded, dim, cut.size)
    return _closed(b, out, piece, move)


def cut(b: Builder, piece: Piece, move: Move, implicit: bool) -> torch.fx.Node:
    """Slice this rank's chunk. No communication. The offset is data."""
    own = _opened(b, piece, move, move.after)
    mine = _own_size(b, move, own)
    device = piece.node.meta["val"].device
    steps = b.call(aten.arange.default, mine, dtype=torch.int64, device=device)
    start = b.start(move.axis, own.size, own.unit)
    rows = b.call(aten.add.Tensor, steps, start)
    x = _open(b, piece.node, own, own.size)
    out = b.call(aten.index_select.default, x, _place(own), rows)
    return _closed(b, out, piece, move)


def reduce(b: Builder, piece: Piece, move: Move, implicit: bool) -> torch.fx.Node:
    """All-reduce."""
    op = str(move.before[move.axis])
    x = b.contiguous(piece.node)
    return _communicate(b, piece, move, implicit, x, op)


def reduce_scatter(b: Builder, piece: Piece, move: Move, implicit: bool) -> torch.fx.Node:
    """Reduce-scatter along a dim."""
    op = str(move.before[move.axis])
    cut = _opened(b, piece, move, move.after)
    dim = _place(cut)
    n = _ranks(b, move)
    full = layout.full_chunk(cut.size, cut.unit, n)
    x = _open(b, piece.node, cut, cut.size)
    padded = _padded(b, x, dim, full * n)
    chunks = _split_dim(b, padded, dim, n)
    _, *shape = _shape(chunks)
    flat = _flat(b, chunks)
    received = _communicate(b, piece, move, implicit, flat, op, n)
    out = b.call(aten.view.default, received, shape)
    out = _first(b, out, dim, _own_size(b, move, cut))
    return _closed(b, out, piece, move)


def all_to_all(b: Builder, piece: Piece, move: Move, implicit: bool) -> torch.fx.Node:
    """All-to-all from one dim to another."""
    src = _opened(b, piece, move, move.before)
    dst = _opened(b, piece, move, move.after)
    n = _ranks(b, move)
    src_full = layout.full_chunk(src.size, src.unit, n)
    dst_full = layout.full_chunk(dst.size, dst.unit, n)
    x, src_dim, dst_dim = _opened_twice(b, piece.node, move, src, dst)
    x = _padded(b, x, src_dim, src_full)
    x = _padded(b, x, dst_dim, dst_full * n)
    chunks = _split_dim(b, x, dst_dim, n)
    shape = _shape(chunks)
    lengths = [shape.numel() // n] * n
    flat = _flat(b, chunks)
    received = _communicate(b, piece, move, implicit, flat, lengths, lengths)
    out = b.call(aten.view.default, received, list(shape))
    out = _join_dim(b, out, src_dim)
    out = _first(b, out, src_dim, src.size)
    out = _first(b, out, dst_dim, _own_size(b, move, dst))
    return _closed(b, out, piece, move)


def _opened_twice(
    b: Builder, x: torch.fx.Node, move: Move, src: strided.Open, dst: strided.Open
) -> tuple[torch.fx.Node, int, int]:
    """A value opened at the dim that is gathered and at the one that is sharded, and the numbers
    of the two dims.
    """
    sides = [(src, _own_size(b, move, src)), (dst, dst.size)]
    for side, size in sorted(sides, key=lambda s: -s[0].dim):
        x = _open(b, x, side, size)
    return (x, _place(src) + _inserted(dst, src), _place(dst) + _inserted(src, dst))


def _inserted(other: strided.Open, own: strided.Open) -> int:
    """How many dims opening another dim inserts before an axis' own."""
    return 2 if other.dim < own.dim and not other.is_dim else 0


def halo(b: Builder, piece: Piece, move: Move, implicit: bool) -> torch.fx.Node:
    """Exchange edges with the neighbours, and put the chunk between theirs. A short chunk is
    followed by zeros.
    """
    mark = move.after[move.axis]
    x = piece.node
    n = _ranks(b, move)
    dim, unit = layout.cut_of(mark)
    widths = layout.halo(mark)
    if n == 1:
        dims_behind = len(piece.shape) - 1 - dim
        pads = [0, 0] * dims_behind + [*widths]
        return b.call(aten.constant_pad_nd.default, x, pads)
    size = layout.full_chunk(piece.shape[dim], unit, n)
    padded = _padded(b, x, dim, size)
    first, last = _edges(b, padded, dim, widths)
    sent = b.call(aten.cat.default, [first, last])
    count = _shape(last).numel()
    received = _communicate(b, piece, move, implicit, sent, count)
    if not _shape(x)[dim]:
        return x
    return _between(b, x, received, dim, widths)


def _edges(
    b: Builder, x: torch.fx.Node, dim: int, halo: tuple[int, int]
) -> tuple[torch.fx.Node, torch.fx.Node]:
    """The flat rows of a chunk that its neighbours read: the first ones for the previous rank,
    as its halo after, the last ones for the next rank, as its halo before.
    """
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
    """A chunk between the rows that its neighbours sent. They arrive flat: those before it,
    then those after it.
    """
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


def ppermute(b: Builder, piece: Piece, move: Move, implicit: bool) -> torch.fx.Node:
    """Permute: send each rank's value to another. Zeros without a source."""
    x = b.contiguous(piece.node)
    if _ranks(b, move) == 1:
        return x if move.perm else b.call(aten.zeros_like.default, x)
    sources = [s for s, _ in move.perm]
    targets = [t for _, t in move.perm]
    flat = _flat(b, x)
    received = _communicate(b, piece, move, implicit, flat, sources, targets)
    shape = list(_shape(x))
    return b.call(aten.view.default, received, shape)


implement(ALL_GATHER, emit=gather)
implement(ALL_REDUCE, emit=reduce)
implement(REDUCE_SCATTER, emit=reduce_scatter)
implement(ALL_TO_ALL, emit=all_to_all)
implement(HALO, emit=halo)
implement(PPERMUTE, emit=ppermute)
