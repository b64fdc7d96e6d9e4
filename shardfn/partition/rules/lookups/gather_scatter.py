"""Lookups and their gradients: embedding, gather, scatter, index_select.

A lookup in a table that is sharded along the indexed dim gives zeros for entries of other
ranks, so the result is a Partial sum.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...emission.graph_builder import Builder, LocalShard
from ...rule_api.op_record import Op
from ...rule_api.strategy import Choice, OpCall, replicated, together
from ..dtypes import reduces

aten = torch.ops.aten


def embedding(call: OpCall) -> list[Choice]:
    """Shard an embedding over index dims, columns, or rows of the table (a Partial sum)."""
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
    """Shard an embedding's backward over columns, over rows of the table, or over an index dim,
    which gives a Partial sum.
    """
    grad, index = call.ins
    last = grad.dim() - 1
    choices = [replicated(call), ((last, "R"), (1,))]
    if call.arg(4, "scale_grad_by_freq", False):
        return choices
    lookups: list[Choice] = [((d, d), ("sum",)) for d in range(index.dim())]
    return [*choices, *lookups, (("sum", "R"), ("sum",)), (("R", "R"), (0,))]


def _same_sizes(call: OpCall, *positions: int) -> list[int]:
    """List the dims in which all these inputs have the same size."""
    first, *rest = (call.ins[p] for p in positions)
    n = first.dim()
    if any(x.dim() != n for x in rest):
        return []
    sizes = first.shape
    return [d for d in range(n) if all(x.shape[d] == sizes[d] for x in rest)]


def _except(dims: list[int], dim: int) -> list[int]:
    """Drop one dim from a list."""
    return [d for d in dims if d != dim]


def gather(call: OpCall) -> list[Choice]:
    """Shard a gather over other dims or the index; a table sharded along the dim gives a
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
    """Shard a scatter over other dims, or its target along the dim."""
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
    """Shard an index_select over other dims or the index; a table sharded along the dim gives a
    Partial sum.
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
    """Shard a scatter_reduce over the dims that are not indexed. Extremes of the sources of each
    rank and of the target are a Partial maximum or minimum.
    """
    x = call.ins[0]
    if any(t.dim() == 0 for t in call.ins):
        return [replicated(call)]
    dim = call.args[1] % x.dim()
    same = _same_sizes(call, *range(len(call.ins)))
    others = _except(same, dim)
    choices = [replicated(call), *together(call, others)]
    partial = EXTREMES.get(call["reduce"])
    if partial and call["include_self"] and reduces(x.dtype) and dim in _same_sizes(call, 1, 2):
        choices.append((("R", dim, dim), (partial,)))
    return choices


def index_reduce(call: OpCall) -> list[Choice]:
    """Shard an index_reduce over the dims that are not indexed."""
    x, _, rows = call.ins
    if not x.dim() or not rows.dim():
        return [replicated(call)]
    n = x.dim()
    dim = call.args[1] % n
    others: list[Choice] = [((d, "R", d), (d,)) for d in range(n) if d != dim]
    return [replicated(call), *others]


def looked_up(call: OpCall) -> list[Choice]:
    """Shard a searchsorted or bucketize over the dims of the values."""
    if len(call.ins) != 2:
        return [replicated(call)]
    # searchsorted takes the sorted row first, bucketize last
    row_first = call.target is aten.searchsorted.Tensor
    row, values = call.ins if row_first else reversed(call.ins)
    if row.dim() != 1:
        return [replicated(call)]
    choices = [replicated(call)]
    for d in range(values.dim()):
        placements = ("R", d) if row_first else (d, "R")
        choices.append((placements, (d,)))
    return choices


def hits(b: Builder, table: LocalShard, dim: int, index: Any) -> tuple[Any, Any]:
    """Emit a mask of the indices inside this rank's shard of a table, and the indices relative
    to its start.
    """
    size = table.local_shape[dim]
    offset = b.offset(table, dim)
    shifted = b.call(aten.sub.Tensor, index, offset)
    low = b.call(aten.ge.Scalar, shifted, 0)
    high = b.call(aten.lt.Scalar, shifted, size)
    hit = b.call(aten.logical_and.default, low, high)
    return hit, shifted


def read_index(b: Builder, table: LocalShard, dim: int, index: Any) -> tuple[Any, Any]:
    """Emit the mask of `hits`, and the indices at which a rank reads its shard: 0 for elements of
    other ranks. An index that no rank has is out of range on every rank, so that the op raises
    torch's error.
    """
    hit, shifted = hits(b, table, dim, index)
    outside = b.call(aten.mul.Tensor, _is_outside(b, table, dim, index), table.local_shape[dim])
    return hit, b.call(aten.where.self, hit, shifted, outside)


def written_index(b: Builder, table: LocalShard, dim: int, index: Any) -> Any:
    """Emit the indices at which a rank writes its shard with an extra slot at the end, which
    takes what other ranks write. An index that no rank has is out of range on every rank.
    """
    hit, shifted = hits(b, table, dim, index)
    slot = b.call(aten.add.Tensor, _is_outside(b, table, dim, index), table.local_shape[dim])
    return b.call(aten.where.self, hit, shifted, slot)


def _is_outside(b: Builder, table: LocalShard, dim: int, index: Any) -> Any:
    """Emit the mask of the indices that are out of range of the global table."""
    nearest = b.call(aten.clamp.default, index, 0, max(table.shape[dim] - 1, 0))
    return b.call(aten.ne.Tensor, index, nearest)


def zeros_elsewhere(b: Builder, hit: Any, read: Any) -> Any:
    """Emit the elements that were read where a mask is true, zeros elsewhere."""
    zeros = b.call(aten.zeros_like.default, read)
    return b.call(aten.where.self, hit, read, zeros)


def lower_embedding(
    b: Builder, args: list[Any], kwargs: dict[str, Any], shards: list[LocalShard]
) -> Any:
    """Look rows up in the local shard, with zeros for other ranks' rows."""
    if not shards[0].is_sharded(0):
        return b.call(aten.embedding.default, *args, **kwargs)
    table, index, *_ = args
    hit, inside = read_index(b, shards[0], 0, index)
    rows = b.call(aten.embedding.default, table, inside)  # (*index.shape, columns)
    hit_rows = b.call(aten.unsqueeze.default, hit, -1)
    return zeros_elsewhere(b, hit_rows, rows)


def lower_embedding_backward(b: Builder, args: list[Any], out: LocalShard) -> Any:
    """Sum the gradients of the rows of this rank's shard; a rank without rows has one for a moment,
    as torch takes no index into none.
    """
    op = aten.embedding_dense_backward.default
    if not out.is_sharded(0):
        return b.call(op, *args)
    grad, index, _, padding, by_frequency = args
    hit, shifted = hits(b, out, 0, index)
    if padding >= 0:
        is_other = b.call(aten.ne.Scalar, index, padding)
        hit = b.call(aten.logical_and.default, hit, is_other)
    hit_rows = b.call(aten.unsqueeze.default, hit, -1)
    own = zeros_elsewhere(b, hit_rows, grad)
    inside = b.call(aten.mul.Tensor, shifted, hit)
    rows = out.local_shape[0]
    if rows:
        return b.call(op, own, inside, rows, -1, by_frequency)
    single = b.call(op, own, inside, 1, -1, by_frequency)
    return b.contiguous(b.call(aten.slice.Tensor, single, 0, 0, 0))


def lower_gather(
    b: Builder, args: list[Any], kwargs: dict[str, Any], shards: list[LocalShard]
) -> Any:
    """Gather from the local shard, with zeros for other ranks' elements."""
    table = shards[0]
    dim = args[1] % max(len(table.shape), 1)
    if not table.is_sharded(dim):
        return b.call(aten.gather.default, *args, **kwargs)
    hit, inside = read_index(b, table, dim, args[2])
    elements = b.call(aten.gather.default, args[0], dim, inside)
    return zeros_elsewhere(b, hit, elements)


def lower_index_select(
    b: Builder, args: list[Any], kwargs: dict[str, Any], shards: list[LocalShard]
) -> Any:
    """Select from the local shard, with zeros for other ranks' slices."""
    table = shards[0]
    n = len(table.shape)
    dim = args[1] % max(n, 1)
    if not table.is_sharded(dim):
        return b.call(aten.index_select.default, *args, **kwargs)
    hit, inside = read_index(b, table, dim, args[2])
    slices = b.call(aten.index_select.default, args[0], dim, inside)
    wide = [-1 if d == dim else 1 for d in range(n)]
    hit_slices = b.call(aten.view.default, hit, wide)
    return zeros_elsewhere(b, hit_slices, slices)


def with_contiguous_index(b: Builder, args: list[Any]) -> list[Any]:
    """Copy the index of a scatter if it is smaller than the table, since torch's CPU kernel
    misreads an expanded one (2.13).

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
    b: Builder, args: list[Any], kwargs: dict[str, Any], shards: list[LocalShard]
) -> Any:
    """Run scatter_reduce on local shards."""
    args = with_contiguous_index(b, args)
    return b.call(aten.scatter_reduce.two, *args, **kwargs)


def lower_index_reduce(
    b: Builder, args: list[Any], kwargs: dict[str, Any], shards: list[LocalShard]
) -> Any:
    """Run index_reduce on local shards. torch's CPU kernel fails on products of 16 bits whose rows
    have one element (torch 2.13), so such rows are the elements of a vector.
    """
    x, dim, index, source, reduce = args
    value = x.meta["val"]
    is_column = value.dim() > 1 and value.numel() == value.shape[dim] > 0
    if reduce != "prod" or value.dtype not in HALVES or not is_column:
        return b.call(aten.index_reduce.default, *args, **kwargs)
    vector = b.call(aten.view.default, x, [-1])
    rows = b.call(aten.view.default, source, [-1])
    reduced = b.call(aten.index_reduce.default, vector, 0, index, rows, reduce, **kwargs)
    return b.call(aten.view.default, reduced, list(value.shape))


def lower_scatter(target: Any) -> Any:
    """Scatter into the local shard; other ranks' indices go to an extra slot that is sliced off."""

    def lower(b: Builder, args: list[Any], kwargs: dict[str, Any], shards: list[LocalShard]) -> Any:
        table = shards[0]
        dim = args[1] % max(len(table.shape), 1)
        args = with_contiguous_index(b, args)
        if not table.is_sharded(dim):
            return b.call(target, *args, **kwargs)
        size = table.local_shape[dim]
        later_dims = len(table.shape) - 1 - dim
        index = written_index(b, table, dim, args[2])
        pads = [0, 0] * later_dims + [0, 1]
        wide = b.call(aten.constant_pad_nd.default, args[0], pads)
        written = b.call(target, wide, dim, index, *args[3:], **kwargs)
        own = b.call(aten.slice.Tensor, written, dim, 0, size)
        return b.contiguous(own)

    return lower


HALVES = torch.float16, torch.bfloat16
EXTREMES = {"amax": "max", "amin": "min"}  # of a scatter_reduce -> the Partial reduction
SCATTERS = (aten.scatter.value, aten.scatter.src, aten.scatter_add.default)


def no_dims(call: OpCall) -> list[int]:
    """Return no dims: the op finds elements by value."""
    return []


def rows_dim(call: OpCall) -> list[int]:
    """Return dim 0: the op finds rows by number."""
    return [0]


def looked_up_dim(call: OpCall) -> list[int]:
    """Return the dim along which the op finds elements by number."""
    n = call.ins[0].dim()
    return [call.args[1] % n] if n else []


along_dim = functools.partial(Op, numbered_dims=looked_up_dim)
TABLE: dict[object, Op] = {
    aten.scatter_reduce.two: along_dim(_one_by_one, lower=lower_scatter_reduce),
    aten.index_reduce.default: along_dim(index_reduce, lower=lower_index_reduce),
    aten.searchsorted.Tensor: Op(looked_up, numbered_dims=no_dims),
    aten.bucketize.Tensor: Op(looked_up, numbered_dims=no_dims),
    aten.embedding.default: Op(embedding, lower=lower_embedding, numbered_dims=rows_dim),
    aten.embedding_dense_backward.default: Op(
        embedding_backward, lower_at=lower_embedding_backward, numbered_dims=no_dims
    ),
    aten.gather.default: along_dim(gather, lower=lower_gather),
    aten.scatter.value: along_dim(scatter, lower=lower_scatter(aten.scatter.value)),
    aten.scatter.src: along_dim(scatter, lower=lower_scatter(aten.scatter.src)),
    aten.scatter_add.default: along_dim(
        scatter, lower=lower_scatter(aten.scatter_add.default), decided_by_first=True
    ),
    aten.index_select.default: along_dim(index_select, lower=lower_index_select),
}
