"""Lookups and their gradients: embedding, gather, scatter, index_select.

A lookup in a table that is sharded along the indexed dim gives zeros for entries of other
ranks, so the result is a Partial sum.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...emission.builder import Builder, Piece
from ...rule_api.op import Op
from ...rule_api.strategy import Choice, OpCall, replicated, together

aten = torch.ops.aten


def embedding(call: OpCall) -> list[Choice]:
    """table[index]: shards any index dim, the table's columns, or the table's rows."""
    index = call.ins[1]
    last = call.outs[0].dim() - 1
    lookups: list[Choice] = [(("R", d), (d,)) for d in range(index.dim())]
    return [
        replicated(call),
        *lookups,
        ((1, "R"), (last,)),
        ((0, "R"), ("sum",)),
        (("sum", "R"), ("sum",)),
    ]


def embedding_backward(call: OpCall) -> list[Choice]:
    """Rows are added, so sharding an index dim gives a Partial sum."""
    grad, index = call.ins
    last = grad.dim() - 1
    choices = [replicated(call), ((last, "R"), (1,))]
    if call.arg(4, "scale_grad_by_freq", False):
        return choices
    lookups: list[Choice] = [((d, d), ("sum",)) for d in range(index.dim())]
    return [*choices, *lookups, (("sum", "R"), ("sum",))]


def _same_sizes(call: OpCall, *positions: int) -> list[int]:
    """The dims that have the same size in all these inputs, if these have as many dims."""
    first, *rest = (call.ins[p] for p in positions)
    n = first.dim()
    if any(x.dim() != n for x in rest):
        return []
    sizes = first.shape
    return [d for d in range(n) if all(x.shape[d] == sizes[d] for x in rest)]


def _except(dims: list[int], dim: int) -> list[int]:
    return [d for d in dims if d != dim]


def gather(call: OpCall) -> list[Choice]:
    """Shards the other dims, or any dim of the index. Sharding the table along the dim gives a
    Partial sum.
    """
    x, at = call.ins
    if x.dim() == 0 or at.dim() == 0:
        return [replicated(call)]
    dim = call.args[1] % x.dim()
    others = _except(_same_sizes(call, 0, 1), dim)
    return [
        replicated(call),
        *together(call, others),
        (("R", dim), (dim,)),
        ((dim, "R"), ("sum",)),
        (("sum", "R"), ("sum",)),
    ]


def scatter(call: OpCall) -> list[Choice]:
    """Shards the other dims. A target sharded along the dim takes the values that fall into
    each shard.
    """
    x = call.ins[0]
    if any(t.dim() == 0 for t in call.ins):
        return [replicated(call)]
    dim = call.args[1] % x.dim()
    n = len(call.ins)
    others = _except(_same_sizes(call, *range(n)), dim)
    whole = ("R",) * (n - 1)
    choices = [replicated(call), *together(call, others), ((dim, *whole), (dim,))]
    if call.target is aten.scatter_add.default:
        choices.append((("sum", "R", "sum"), ("sum",)))
        if dim in _same_sizes(call, 1, 2):
            choices.append((("sum", dim, dim), ("sum",)))
    return choices


def index_select(call: OpCall) -> list[Choice]:
    """Shards the other dims, or the index. Sharding the table along the dim gives a Partial
    sum.
    """
    n = call.ins[0].dim()
    index = call.ins[1]
    if n == 0:
        return [replicated(call)]
    dim = call.args[1] % n
    others: list[Choice] = [((d, "R"), (d,)) for d in range(n) if d != dim]
    choices = [replicated(call), (("sum", "R"), ("sum",)), ((dim, "R"), ("sum",)), *others]
    if index.dim():
        choices.append((("R", 0), (dim,)))
    return choices


def _one_by_one(call: OpCall) -> list[Choice]:
    """Shards the other dims of the tensor and of the written values."""
    x = call.ins[0]
    if any(t.dim() == 0 for t in call.ins):
        return [replicated(call)]
    dim = call.args[1] % x.dim()
    same = _same_sizes(call, *range(len(call.ins)))
    others = _except(same, dim)
    return [replicated(call), *together(call, others)]


def index_reduce(call: OpCall) -> list[Choice]:
    """x[index] reduced with rows: shards the dims that are not indexed."""
    x, _, rows = call.ins
    if not x.dim() or not rows.dim():
        return [replicated(call)]
    n = x.dim()
    dim = call.args[1] % n
    others: list[Choice] = [((d, "R", d), (d,)) for d in range(n) if d != dim]
    return [replicated(call), *others]


def looked_up(call: OpCall) -> list[Choice]:
    """A search in one sorted row: shards any dim of the values."""
    if len(call.ins) != 2:
        return [replicated(call)]
    # searchsorted takes the sorted row first, bucketize last
    row_first = call.target is aten.searchsorted.Tensor
    row, values = call.ins if row_first else reversed(call.ins)
    if row.dim() != 1:
        return [replicated(call)]
    choices = [replicated(call)]
    for d in range(values.dim()):
        marks = ("R", d) if row_first else (d, "R")
        choices.append((marks, (d,)))
    return choices


def hits(b: Builder, table: Piece, dim: int, index: Any) -> tuple[Any, Any]:
    """(a mask of the indices inside this rank's shard of the table, the indices relative to its
    start).
    """
    size = table.local_shape[dim]
    offset = b.offset(table, dim)
    shifted = b.call(aten.sub.Tensor, index, offset)
    low = b.call(aten.ge.Scalar, shifted, 0)
    high = b.call(aten.lt.Scalar, shifted, size)
    hit = b.call(aten.logical_and.default, low, high)
    return hit, shifted


def zeros_elsewhere(b: Builder, hit: Any, read: Any) -> Any:
    """The elements that were read where the mask is true, zeros elsewhere."""
    zeros = b.call(aten.zeros_like.default, read)
    return b.call(aten.where.self, hit, read, zeros)


def lower_embedding(
    b: Builder, args: list[Any], kwargs: dict[str, Any], pieces: list[Piece]
) -> Any:
    """Looks up in the local shard, with zeros for rows of other ranks."""
    if not pieces[0].cuts(0):
        return b.call(aten.embedding.default, *args, **kwargs)
    table, index, *_ = args
    hit, shifted = hits(b, pieces[0], 0, index)
    inside = b.call(aten.mul.Tensor, shifted, hit)
    rows = b.call(aten.embedding.default, table, inside)  # (*index.shape, columns)
    hit_rows = b.call(aten.unsqueeze.default, hit, -1)
    return zeros_elsewhere(b, hit_rows, rows)


def lower_gather(b: Builder, args: list[Any], kwargs: dict[str, Any], pieces: list[Piece]) -> Any:
    """Gathers from the local shard, with zeros for elements of other ranks."""
    table = pieces[0]
    dim = args[1] % max(len(table.shape), 1)
    if not table.cuts(dim):
        return b.call(aten.gather.default, *args, **kwargs)
    hit, shifted = hits(b, table, dim, args[2])
    inside = b.call(aten.mul.Tensor, shifted, hit)
    elements = b.call(aten.gather.default, args[0], dim, inside)
    return zeros_elsewhere(b, hit, elements)


def lower_index_select(
    b: Builder, args: list[Any], kwargs: dict[str, Any], pieces: list[Piece]
) -> Any:
    """Selects from the local shard, with zeros for slices of other ranks."""
    table = pieces[0]
    n = len(table.shape)
    dim = args[1] % max(n, 1)
    if not table.cuts(dim):
        return b.call(aten.index_select.default, *args, **kwargs)
    hit, shifted = hits(b, table, dim, args[2])
    inside = b.call(aten.mul.Tensor, shifted, hit)
    slices = b.call(aten.index_select.default, args[0], dim, inside)
    wide = [-1 if d == dim else 1 for d in range(n)]
    hit_slices = b.call(aten.view.default, hit, wide)
    return zeros_elsewhere(b, hit_slices, slices)


def with_own_index(b: Builder, args: list[Any]) -> list[Any]:
    """The arguments with a contiguous copy of the index if the index is smaller than the table
    in a dim other than `dim`.

    For such an index made by `expand`, torch's CPU kernel uses the table's sizes (2.13, along
    dim 0).
    """
    table, dim, index, *others = args
    table_shape = table.meta["val"].shape
    index_shape = index.meta["val"].shape
    smaller = any(
        i < n
        for d, (i, n) in enumerate(zip(index_shape, table_shape, strict=False))
        if d != dim % len(table_shape)
    )
    if not smaller:
        return args
    own_index = b.contiguous(index)
    return [table, dim, own_index, *others]


def lower_scatter_reduce(
    b: Builder, args: list[Any], kwargs: dict[str, Any], pieces: list[Piece]
) -> Any:
    """The op itself."""
    args = with_own_index(b, args)
    return b.call(aten.scatter_reduce.two, *args, **kwargs)


def lower_scatter(target: Any) -> Any:
    """Indices outside of the shard go to one extra slot, which is sliced off again."""

    def lower(b: Builder, args: list[Any], kwargs: dict[str, Any], pieces: list[Piece]) -> Any:
        table = pieces[0]
        dim = args[1] % max(len(table.shape), 1)
        args = with_own_index(b, args)
        if not table.cuts(dim):
            return b.call(target, *args, **kwargs)
        size = table.local_shape[dim]
        behind = len(table.shape) - 1 - dim
        hit, shifted = hits(b, table, dim, args[2])
        outside = b.call(aten.full_like.default, shifted, size)
        index = b.call(aten.where.self, hit, shifted, outside)
        pads = [0, 0] * behind + [0, 1]
        wide = b.call(aten.constant_pad_nd.default, args[0], pads)
        written = b.call(target, wide, dim, index, *args[3:], **kwargs)
        own = b.call(aten.slice.Tensor, written, dim, 0, size)
        return b.contiguous(own)

    return lower


SCATTERS = (aten.scatter.value, aten.scatter.src, aten.scatter_add.default)


def no_dims(call: OpCall) -> list[int]:
    """Of an op that finds the place of an element by its value."""
    return []


def rows_dim(call: OpCall) -> list[int]:
    """Of an op that finds rows by their numbers."""
    return [0]


def looked_up_dim(call: OpCall) -> list[int]:
    """Of an op that takes the dim along which it finds elements by their numbers."""
    n = call.ins[0].dim()
    return [call.args[1] % n] if n else []


along_dim = functools.partial(Op, numbered_dims=looked_up_dim)
TABLE: dict[object, Op] = {
    aten.scatter_reduce.two: along_dim(_one_by_one, lower=lower_scatter_reduce),
    aten.index_reduce.default: along_dim(index_reduce),
    aten.searchsorted.Tensor: Op(looked_up, numbered_dims=no_dims),
    aten.bucketize.Tensor: Op(looked_up, numbered_dims=no_dims),
    aten.embedding.default: Op(embedding, lower=lower_embedding, numbered_dims=rows_dim),
    aten.embedding_dense_backward.default: Op(embedding_backward, numbered_dims=no_dims),
    aten.gather.default: along_dim(gather, lower=lower_gather),
    aten.scatter.value: along_dim(scatter, lower=lower_scatter(aten.scatter.value)),
    aten.scatter.src: along_dim(scatter, lower=lower_scatter(aten.scatter.src)),
    aten.scatter_add.default: along_dim(
        scatter, lower=lower_scatter(aten.scatter_add.default), decided_by_first=True
    ),
    aten.index_select.default: along_dim(index_select, lower=lower_index_select),
}
