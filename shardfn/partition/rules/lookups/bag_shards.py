"""Embedding bags on shards: the rows of a rank's shard of the table, added in the rank's bags."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from ....ops.nodes import args_of
from ...emission.builder import Builder, Piece
from ...rule_api.strategy import named
from .reads import hits, zeros_elsewhere

aten = torch.ops.aten
FORWARD = aten._embedding_bag.default
FORWARD_ONLY = aten._embedding_bag_forward_only.default
BACKWARD = aten._embedding_bag_backward.default
WEIGHTS_BACKWARD = aten._embedding_bag_per_sample_weights_backward.default
SUM, MEAN, MAX = range(3)


@attrs.frozen
class Options:
    """The numbers of a call.

    Args:
        mode: 0 for sums, 1 for means, 2 for maxima.
        padding: the index that adds nothing; negative for none.
        long: the number of indices in each bag, where the program says that all have as many.
        open_end: whether the last bag goes to the end of the indices.
    """

    mode: int
    padding: int
    long: int | None
    open_end: bool


def options_of(target: Any, args: Any, kwargs: Any) -> Options:
    """The numbers of a call with nodes for tensors."""
    values = named(target, args, kwargs)
    return Options(
        mode=values["mode"],
        padding=values["padding_idx"],
        long=_long(values["indices"], values.get("offsets")),
        open_end=not values.get("include_last_offset", False),
    )


def _long(indices: torch.fx.Node, offsets: torch.fx.Node | None) -> int | None:
    """The step of the offsets, where they count from 0 to the number of indices."""
    if offsets is None or offsets.target is not aten.arange.start_step:
        return None
    n = indices.meta["val"].numel()
    first, last, step, *_ = args_of(offsets)
    is_even = n > 0 and step > 0 and n % step == 0
    return step if is_even and (first, last) == (0, n) else None


@attrs.frozen
class _Bags:
    """The bags of a rank. Those of sharded indices are equally long, as the rule says.

    Args:
        b: the builder.
        indices: the rank's.
        offsets: where bags begin, in the global indices.
        o: the numbers of the call.
    """

    b: Builder
    indices: Piece
    offsets: Piece
    o: Options

    @property
    def count(self) -> int:
        """The number of the rank's indices."""
        return self.indices.local_shape[0]

    def numbers(self, n: int) -> Any:
        """The numbers from 0 to n."""
        device = self.indices.node.meta["val"].device
        return self.b.call(aten.arange.default, n, device=device)

    def even(self, n: int) -> Any:
        """The bag of each of n indices, where all are equally long."""
        numbers = self.numbers(n)
        return self.b.call(
            aten.div.Tensor_mode,
            numbers,
            self.o.long,
            rounding_mode="floor",
        )

    def whole(self) -> Any:
        """The bag of each of the global indices."""
        n = self.indices.shape[0]
        if self.o.long:
            return self.even(n)
        after = self.b.call(
            aten.searchsorted.Tensor,
            self.offsets.node,
            self.numbers(n),
            right=True,
        )
        return self.b.call(
            aten.sub.Tensor,
            after,
            1,
        )

    def own(self) -> Any:
        """The global number of the bag of each of the rank's indices."""
        if not self.o.long:
            return self.whole()
        start = self.b.offset(self.indices, 0)
        first = self.b.call(
            aten.div.Tensor_mode,
            start,
            self.o.long,
            rounding_mode="floor",
        )
        numbers = self.even(self.count)
        return self.b.call(
            aten.add.Tensor,
            numbers,
            first,
        )

    def local(self) -> Any:
        """The number of the bag of each index among the rank's bags."""
        return self.even(self.count) if self.o.long else self.whole()

    def read(self) -> Any:
        """A mask of the indices that are not padding; None if all are read."""
        if self.o.padding < 0:
            return None
        return self.b.call(
            aten.ne.Scalar,
            self.indices.node,
            self.o.padding,
        )

    def lengths(self, bags: int) -> Any:
        """The number of indices in each of the rank's bags, without padding."""
        read = self.read()
        if read is None:
            read = self.b.call(
                aten.ones_like.default,
                self.indices.node,
            )
        read = self.b.call(
            aten._to_copy.default,
            read,
            dtype=torch.int64,
        )
        return self.added(bags, read)

    def added(self, bags: int, values: Any) -> Any:
        """Values of indices, added in bags."""
        like = values.meta["val"]
        zeros = self.b.call(
            aten.zeros.default,
            [bags, *like.shape[1:]],
            dtype=like.dtype,
            device=like.device,
        )
        return self.b.call(
            aten.index_add.default,
            zeros,
            0,
            self.local(),
            values,
        )


def _bags_of(
    b: Builder, values: dict[str, Any], indices: Piece, offsets: Piece
) -> _Bags:
    """The bags of a rank's indices."""
    is_open = not values.get("include_last_offset", False)
    long = None
    if indices.cuts(0):
        long = indices.shape[0] // offsets.shape[0]
    padding = values["padding_idx"]
    o = Options(values["mode"], padding, long, is_open)
    return _Bags(b, indices, offsets, o)


def lower_bags(target: Any) -> Any:
    """The rows of the rank's shard, added in the rank's bags; zeros for other rows."""

    def lower(
        b: Builder, args: list[Any], kwargs: dict[str, Any], pieces: list[Piece]
    ) -> Any:
        table, indices, offsets, *weights = pieces
        is_empty = 0 in table.local_shape or 0 in indices.local_shape
        if not (table.cuts(0) or indices.cuts(0) or is_empty):
            return b.call(target, *args, **kwargs)
        values = named(target, args, kwargs)
        own = _bags_of(b, values, indices, offsets)
        return _lowered(own, table, weights, values)

    return lower


def _lowered(
    own: _Bags, table: Piece, weights: list[Piece], values: dict[str, Any]
) -> list[Any]:
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
    return [out, *map(of_dtype, (own.whole(), lengths, most))]


def _rows(own: _Bags, table: Piece) -> Any:
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
        return b.call(
            aten.new_zeros.default,
            table.node,
            shape,
        )
    rows = b.call(
        aten.index_select.default,
        table.node,
        0,
        at,
    )
    return _masked(b, rows, mask)


def _column(b: Builder, x: Any) -> Any:
    """A number for each row, as a column."""
    return b.call(
        aten.unsqueeze.default,
        x,
        -1,
    )


def _masked(b: Builder, rows: Any, mask: Any) -> Any:
    """Rows, with zeros where the mask is false."""
    if mask is None:
        return rows
    column = _column(b, mask)
    return zeros_elsewhere(b, column, rows)


def _scaled(b: Builder, rows: Any, weights: Any) -> Any:
    """Rows times a weight each."""
    column = _column(b, weights)
    return b.call(
        aten.mul.Tensor,
        rows,
        column,
    )


def _divided(b: Builder, sums: Any, lengths: Any) -> Any:
    """Sums over bags as means. An empty bag stays zero."""
    least = b.call(
        aten.clamp.default,
        lengths,
        1,
    )
    column = _column(b, least)
    return b.call(
        aten.div.Tensor,
        sums,
        column,
    )


def _gradients(own: _Bags, grad: Piece) -> Any:
    """The gradient of the bag of each index, zeros for bags of other ranks and padding."""
    b = own.b
    mask = own.read()
    bag = own.own()
    if grad.cuts(0):
        hit, shifted = hits(b, grad, 0, bag)
        bag = b.call(aten.mul.Tensor, shifted, hit)
        mask = hit if mask is None else b.call(aten.logical_and.default, hit, mask)
    rows = b.call(
        aten.index_select.default,
        grad.node,
        0,
        bag,
    )
    return _masked(b, rows, mask)


def lower_backward(
    b: Builder, args: list[Any], kwargs: dict[str, Any], pieces: list[Piece]
) -> Any:
    """The gradients of the rank's bags, added in the rows of their indices."""
    grad, indices, offsets, _, _, _, *weights = pieces
    if not grad.cuts(0):
        return b.call(BACKWARD, *args, **kwargs)
    values = named(BACKWARD, args, kwargs)
    own = _bags_of(b, values, indices, offsets)
    rows = _gradients(own, grad)
    if own.o.mode == MEAN:
        bags = own.count // own.o.long if own.o.long else offsets.shape[0]
        lengths = own.lengths(bags)
        each = b.call(
            aten.index_select.default,
            lengths,
            0,
            own.local(),
        )
        rows = _divided(b, rows, each)
    if weights:
        rows = _scaled(b, rows, weights[0].node)
    return b.call(
        aten.embedding_dense_backward.default,
        rows,
        indices.node,
        values["num_weights"],
        -1,
        False,
    )


def lower_weights_backward(
    b: Builder, args: list[Any], kwargs: dict[str, Any], pieces: list[Piece]
) -> Any:
    """The products of the rows of the rank's shard with gradients of the rank's bags."""
    grad, table, indices, offsets, _ = pieces
    if not (grad.cuts(0) or table.cuts(0)):
        return b.call(WEIGHTS_BACKWARD, *args, **kwargs)
    values = named(WEIGHTS_BACKWARD, args, kwargs)
    own = _bags_of(b, values, indices, offsets)
    gradients = _gradients(own, grad)
    rows = _rows(own, table)
    product = b.call(
        aten.mul.Tensor,
        gradients,
        rows,
    )
    return b.call(
        aten.sum.dim_IntList,
        product,
        [1],
    )


LOWER = {
    FORWARD: lower_bags(FORWARD),
    FORWARD_ONLY: lower_bags(FORWARD_ONLY),
    BACKWARD: lower_backward,
    WEIGHTS_BACKWARD: lower_weights_backward,
}
# Ops that a rank with an empty shard runs, too: not all of their results are empty then.
RUN_EMPTY = {FORWARD, FORWARD_ONLY}
