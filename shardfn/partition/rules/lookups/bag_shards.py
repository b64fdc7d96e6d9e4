"""Embedding bags on shards: the rows of a rank's shard of the table, added in the rank's bags."""

from __future__ import annotations

from typing import Any

import torch

from ...emission.builder import Builder, Piece
from ...rule_api.strategy import named
from .bag_numbers import MAX, MEAN, SUM, Bags, bags_of
from .reads import hits, zeros_elsewhere

aten = torch.ops.aten
FORWARD = aten._embedding_bag.default
FORWARD_ONLY = aten._embedding_bag_forward_only.default
BACKWARD = aten._embedding_bag_backward.default
WEIGHTS_BACKWARD = aten._embedding_bag_per_sample_weights_backward.default


def lower_bags(target: Any) -> Any:
    """The rows of the rank's shard, added in the rank's bags; zeros for other rows."""

    def lower(b: Builder, args: list[Any], kwargs: dict[str, Any], pieces: list[Piece]) -> Any:
        table, indices, offsets, *weights = pieces
        is_empty = 0 in table.local_shape or 0 in indices.local_shape
        if not (table.cuts(0) or indices.cuts(0) or is_empty):
            return b.call(target, *args, **kwargs)
        values = named(target, args, kwargs)
        own = bags_of(b, values, indices, offsets)
        out, *numbers = _lowered(own, table, weights, values)
        kept = _kept(b, target, args, kwargs, pieces)
        pairs = zip(numbers, kept, strict=True)
        return [out, *(x if is_kept else _empty(b, x) for x, is_kept in pairs)]

    return lower


def _empty(b: Builder, x: Any) -> Any:
    return b.call(aten.new_empty.default, x, [0])


def _kept(
    b: Builder, target: Any, args: list[Any], kwargs: dict[str, Any], pieces: list[Piece]
) -> list[bool]:
    """Which of its results about the bags torch keeps on this device: for sums in float32 on the
    CPU not which bag each index belongs to, for sums and means on GPUs no index of a maximum.
    A rank without bags asks for the global tensors too.
    """
    shapes = {piece.node: piece.shape for piece in pieces}

    def value(x: Any) -> Any:
        known = shapes.get(x) if isinstance(x, torch.fx.Node) else None
        return x if known is None else x.meta["val"].new_empty(known)

    with b.mode:
        options = {name: value(x) for name, x in kwargs.items()}
        _, *numbers = target(*map(value, args), **options)
    return [tuple(x.shape) != (0,) for x in numbers]


def _lowered(own: Bags, table: Piece, weights: list[Piece], values: dict[str, Any]) -> list[Any]:
    """The four results of a call on shards."""
    b = own.b
    ends = int(not own.o.open_end)
    bags = own.offsets.shape[0] - ends
    if own.o.long:
        bags = own.count // own.o.long
    rows = _rows(own, table)
    if weights:
        rows = _scaled(b, rows, weights[0].node)
    out = own.added(bags, rows)
    lengths = own.lengths(bags)
    if own.o.mode == MEAN:
        out = _divided(b, out, lengths)
    if own.o.mode == SUM:
        lengths = b.call(aten.zeros_like.default, lengths)
    dtype = values["indices"].meta["val"].dtype
    of_dtype = lambda x: b.call(aten._to_copy.default, x, dtype=dtype)
    most = lengths
    if own.o.mode == MAX:
        shape = [bags, table.local_shape[1]]
        most = b.call(aten.new_zeros.default, lengths, shape)
    places = own.own() if own.are_parts else own.whole()
    return [out, *map(of_dtype, (places, lengths, most))]


def _rows(own: Bags, table: Piece) -> Any:
    """The row of each index in the rank's shard of the table, zeros for others and padding."""
    b = own.b
    mask = own.read()
    at = own.indices.node
    if table.cuts(0):
        hit, shifted = hits(b, table, 0, at)
        at = b.call(aten.mul.Tensor, shifted, hit)
        mask = hit if mask is None else b.call(aten.logical_and.default, hit, mask)
    if not table.local_shape[0]:
        shape = [own.count, table.local_shape[1]]
        return b.call(aten.new_zeros.default, table.node, shape)
    rows = b.call(aten.index_select.default, table.node, 0, at)
    return _masked(b, rows, mask)


def _column(b: Builder, x: Any) -> Any:
    """A number for each row, as a column."""
    return b.call(aten.unsqueeze.default, x, -1)


def _masked(b: Builder, rows: Any, mask: Any) -> Any:
    """Rows, with zeros where the mask is false."""
    if mask is None:
        return rows
    column = _column(b, mask)
    return zeros_elsewhere(b, column, rows)


def _scaled(b: Builder, rows: Any, weights: Any) -> Any:
    """Rows times a weight each."""
    column = _column(b, weights)
    return b.call(aten.mul.Tensor, rows, column)


def _divided(b: Builder, sums: Any, lengths: Any) -> Any:
    """Sums over bags as means. An empty bag stays zero."""
    least = b.call(aten.clamp.default, lengths, 1)
    column = _column(b, least)
    return b.call(aten.div.Tensor, sums, column)


def _gradients(own: Bags, grad: Piece) -> Any:
    """The gradient of the bag of each index, zeros for bags of other ranks and padding."""
    b = own.b
    mask = own.read()
    bag = own.own()
    if grad.cuts(0):
        hit, shifted = hits(b, grad, 0, bag)
        bag = b.call(aten.mul.Tensor, shifted, hit)
        mask = hit if mask is None else b.call(aten.logical_and.default, hit, mask)
    rows = b.call(aten.index_select.default, grad.node, 0, bag)
    return _masked(b, rows, mask)


def lower_backward(b: Builder, args: list[Any], kwargs: dict[str, Any], pieces: list[Piece]) -> Any:
    """The gradients of the rank's bags, added in the rows of their indices."""
    grad, indices, offsets, _, _, _, *weights = pieces
    if not (grad.cuts(0) or indices.cuts(0)):
        return b.call(BACKWARD, *args, **kwargs)
    values = named(BACKWARD, args, kwargs)
    own = bags_of(b, values, indices, offsets)
    rows = _gradients(own, grad)
    if own.o.mode == MEAN:
        bags = own.count // own.o.long if own.o.long else offsets.shape[0]
        lengths = own.lengths(bags)
        each = b.call(aten.index_select.default, lengths, 0, own.local())
        rows = _divided(b, rows, each)
    if weights:
        rows = _scaled(b, rows, weights[0].node)
    return b.call(
        aten.embedding_dense_backward.default, rows, indices.node, values["num_weights"], -1, False
    )


def lower_weights_backward(
    b: Builder, args: list[Any], kwargs: dict[str, Any], pieces: list[Piece]
) -> Any:
    """The products of the rows of the rank's shard with gradients of the rank's bags."""
    grad, table, indices, offsets, _ = pieces
    if not (grad.cuts(0) or table.cuts(0) or indices.cuts(0)):
        return b.call(WEIGHTS_BACKWARD, *args, **kwargs)
    values = named(WEIGHTS_BACKWARD, args, kwargs)
    own = bags_of(b, values, indices, offsets)
    gradients = _gradients(own, grad)
    rows = _rows(own, table)
    product = b.call(aten.mul.Tensor, gradients, rows)
    return b.call(aten.sum.dim_IntList, product, [1])
