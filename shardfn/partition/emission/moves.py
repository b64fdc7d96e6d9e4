"""The moves of a redistribution as ops of a local graph."""

from __future__ import annotations

import math

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
from ...types import Collective
from .. import layout
from ..payload import nbytes
from ..redistribute import SLICE, Move
from . import wire
from .builder import Builder, Piece

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def apply_move(b: Builder, piece: Piece, move: Move, implicit: bool) -> Piece:
    """Emit one move."""
    emit = cut if move.kind == SLICE else move.collective.emit
    assert emit is not None, f"{move.kind} cannot be emitted"
    node = emit(b, piece, move, implicit)
    node = b.restride(node, piece.shape, piece.stride)
    local = b.local_shape(piece.shape, move.after)
    assert tuple(node.meta["val"].shape) == local, (
        move,
        node.meta["val"].shape,
        local,
    )
    node.meta["type"] = (piece.shape, move.after)
    return Piece(node, piece.shape, piece.stride, move.after, local)


def _communicate(
    b: Builder,
    piece: Piece,
    move: Move,
    implicit: bool,
    x: torch.fx.Node,
    *constants: object,
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
        width = sent.meta["val"].numel() // max(x.meta["val"].numel(), 1)
        sent, constants = _flat(b, sent), (count * width,)
    start = b.call(kind.overload, sent, *constants, b.group_names[move.axis])
    start.meta["collective"] = _record(b, piece, move, implicit)
    return back(b.call(c10d.wait_tensor.default, start))


def _record(b: Builder, piece: Piece, move: Move, implicit: bool) -> Collective:
    kind, dtype = move.collective, piece.node.meta["val"].dtype
    return Collective(
        kind=kind.name,
        axis=b.axes.names[move.axis],
        nbytes=nbytes(piece.shape, dtype.itemsize, move, b.axes, b.coordinates),
        op=str(move.before[move.axis]) if kind.reduces else None,
        name=str(b.about.get("origin", "")),
        source=b.about.get("source"),
        implicit=implicit,
    )


def _level(b: Builder, piece: Piece, move: Move, dim: int) -> int:
    """The size of a dim before this axis shards it."""
    marks = [m if k < move.axis else "R" for k, m in enumerate(move.before)]
    return b.local_shape(piece.shape, tuple(marks))[dim]


def _padded(b: Builder, x: torch.fx.Node, dim: int, size: int) -> torch.fx.Node:
    """Pad with zeros at the end of a dim, so that chunks of unequal size are sent as equal
    ones.
    """
    shape = x.meta["val"].shape
    if shape[dim] == size:
        return x
    return b.call(
        aten.constant_pad_nd.default,
        x,
        [0, 0] * (len(shape) - 1 - dim) + [0, size - shape[dim]],
    )


def _first(b: Builder, x: torch.fx.Node, dim: int, size: int) -> torch.fx.Node:
    return (
        x
        if x.meta["val"].shape[dim] == size
        else b.call(aten.slice.Tensor, x, dim, 0, size)
    )


def _split_dim(b: Builder, x: torch.fx.Node, dim: int, n: int) -> torch.fx.Node:
    """(.., n * m, ..) -> contiguous (n, .., m, ..): the chunks for the ranks, in order."""
    shape = list(x.meta["val"].shape)
    parts = b.call(
        aten.view.default,
        b.contiguous(x),
        [*shape[:dim], n, shape[dim] // n, *shape[dim + 1 :]],
    )
    order = [dim, *(d for d in range(len(shape) + 1) if d != dim)]
    return b.contiguous(b.call(aten.permute.default, parts, order))


def _join_dim(b: Builder, x: torch.fx.Node, dim: int) -> torch.fx.Node:
    """(n, .., m, ..) -> (.., n * m, ..)."""
    n, *shape = x.meta["val"].shape
    order = [*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1)]
    parts = b.contiguous(b.call(aten.permute.default, x, order))
    return b.call(
        aten.view.default, parts, [*shape[:dim], n * shape[dim], *shape[dim + 1 :]]
    )


def _flat(b: Builder, x: torch.fx.Node) -> torch.fx.Node:
    """Move the dim to the front. Collectives split dim 0, so it must exist and hold whole
    chunks.
    """
    return b.call(
        aten.view.default, b.contiguous(x), [-1] if x.meta["val"].numel() else [0]
    )


def gather(b: Builder, piece: Piece, move: Move, implicit: bool) -> torch.fx.Node:
    """All-gather: pad chunks to the full size, join them, and remove the padding at the end."""
    dim, unit = layout.cut_of(move.before[move.axis])
    n, size = b.axes.sizes[move.axis], _level(b, piece, move, dim)
    x = _padded(b, piece.node, dim, layout.full_chunk(size, unit, n))
    shape = list(x.meta["val"].shape)
    out = _communicate(b, piece, move, implicit, _flat(b, x), n)
    out = b.call(aten.view.default, out, [n, *shape])
    return _first(b, _join_dim(b, out, dim), dim, size)


def cut(b: Builder, piece: Piece, move: Move, implicit: bool) -> torch.fx.Node:
    """Slice this rank's chunk. No communication. The offset is data."""
    dim, unit = layout.cut_of(move.after[move.axis])
    n, size = b.axes.sizes[move.axis], _level(b, piece, move, dim)
    mine = layout.chunk(size, unit, n, b.coordinates[move.axis])[1]
    device = piece.node.meta["val"].device
    steps = b.call(aten.arange.default, mine, dtype=torch.int64, device=device)
    rows = b.call(aten.add.Tensor, steps, b.start(move.axis, size, unit))
    return b.call(aten.index_select.default, piece.node, dim, rows)


def reduce(b: Builder, piece: Piece, move: Move, implicit: bool) -> torch.fx.Node:
    """All-reduce."""
    op = str(move.before[move.axis])
    x = b.contiguous(piece.node)
    return _communicate(b, piece, move, implicit, x, op)


def reduce_scatter(
    b: Builder, piece: Piece, move: Move, implicit: bool
) -> torch.fx.Node:
    """Reduce-scatter along a dim."""
    op = str(move.before[move.axis])
    dim, unit = layout.cut_of(move.after[move.axis])
    n, size = b.axes.sizes[move.axis], _level(b, piece, move, dim)
    full = layout.full_chunk(size, unit, n)
    x = _split_dim(b, _padded(b, piece.node, dim, full * n), dim, n)
    shape = list(x.meta["val"].shape[1:])
    out = _communicate(b, piece, move, implicit, _flat(b, x), op, n)
    mine = layout.chunk(size, unit, n, b.coordinates[move.axis])[1]
    return _first(b, b.call(aten.view.default, out, shape), dim, mine)


def all_to_all(
    b: Builder, piece: Piece, move: Move, implicit: bool
) -> torch.fx.Node:
    """All-to-all from one dim to another."""
    src, src_unit = layout.cut_of(move.before[move.axis])
    dst, dst_unit = layout.cut_of(move.after[move.axis])
    n, src_size = b.axes.sizes[move.axis], _level(b, piece, move, src)
    dst_size = piece.node.meta["val"].shape[dst]
    x = _padded(b, piece.node, src, layout.full_chunk(src_size, src_unit, n))
    x = _padded(b, x, dst, layout.full_chunk(dst_size, dst_unit, n) * n)
    x = _split_dim(b, x, dst, n)
    shape = list(x.meta["val"].shape)
    lengths = [x.meta["val"].numel() // n] * n
    out = _communicate(b, piece, move, implicit, _flat(b, x), lengths, lengths)
    out = b.call(aten.view.default, out, shape)
    out = _first(b, _join_dim(b, out, src), src, src_size)
    mine = layout.chunk(dst_size, dst_unit, n, b.coordinates[move.axis])[1]
    return _first(b, out, dst, mine)


def halo(b: Builder, piece: Piece, move: Move, implicit: bool) -> torch.fx.Node:
    """Exchange edges with the neighbours, and put the chunk between theirs. A short chunk is
    followed by zeros.
    """
    mark, x, n = move.after[move.axis], piece.node, b.axes.sizes[move.axis]
    dim, unit = layout.cut_of(mark)
    if n == 1:
        before, after = layout.halo(mark)
        pads = [0, 0] * (len(piece.shape) - 1 - dim) + [before, after]
        return b.call(aten.constant_pad_nd.default, x, pads)
    size = layout.full_chunk(piece.shape[dim], unit, n)
    first, last = _edges(b, _padded(b, x, dim, size), dim, layout.halo(mark))
    sent = b.call(aten.cat.default, [first, last])
    count = last.meta["val"].numel()
    received = _communicate(b, piece, move, implicit, sent, count)
    if not x.meta["val"].shape[dim]:
        return x
    return _between(b, x, received, dim, layout.halo(mark))


def _edges(
    b: Builder, x: torch.fx.Node, dim: int, halo: tuple[int, int]
) -> tuple[torch.fx.Node, torch.fx.Node]:
    """The flat rows of a chunk that its neighbours read: the first ones for the previous rank,
    as its halo after, the last ones for the next rank, as its halo before.
    """
    before, after = halo
    size = x.meta["val"].shape[dim]
    first = _flat(b, b.call(aten.slice.Tensor, x, dim, 0, after))
    last = _flat(b, b.call(aten.slice.Tensor, x, dim, size - before, size))
    return first, last


def _between(
    b: Builder,
    x: torch.fx.Node,
    received: torch.fx.Node,
    dim: int,
    halo: tuple[int, int],
) -> torch.fx.Node:
    """A chunk between the rows that its neighbours sent. They arrive flat: those before it,
    then those after it.
    """
    shape, start = list(x.meta["val"].shape), 0
    edges: list[torch.fx.Node] = []
    for rows in halo:
        edge_shape = [*shape[:dim], rows, *shape[dim + 1 :]]
        end = start + math.prod(edge_shape)
        edge = b.call(aten.slice.Tensor, received, 0, start, end)
        edges.append(b.call(aten.view.default, edge, edge_shape))
        start = end
    return b.call(aten.cat.default, [edges[0], x, edges[1]], dim)


def ppermute(b: Builder, piece: Piece, move: Move, implicit: bool) -> torch.fx.Node:
    """Permute: send each rank's value to another. Zeros without a source."""
    x = b.contiguous(piece.node)
    if b.axes.sizes[move.axis] == 1:
        return x if move.perm else b.call(aten.zeros_like.default, x)
    sources, targets = [s for s, _ in move.perm], [t for _, t in move.perm]
    flat = _flat(b, x)
    received = _communicate(b, piece, move, implicit, flat, sources, targets)
    return b.call(aten.view.default, received, list(x.meta["val"].shape))


implement(ALL_GATHER, emit=gather)
implement(ALL_REDUCE, emit=reduce)
implement(REDUCE_SCATTER, emit=reduce_scatter)
implement(ALL_TO_ALL, emit=all_to_all)
implement(HALO, emit=halo)
implement(PPERMUTE, emit=ppermute)
