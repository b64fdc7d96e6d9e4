"""Embedding bags: rows of a table, added or averaged in bags.

A table sharded by rows gives a Partial sum, one sharded by features needs nothing. Where the
bags are equally long, a rank computes its own bags from its own indices. Of bags of any length
it adds its indices to all bags, a Partial sum. A maximum shards features alone.
"""

from __future__ import annotations

import functools
from typing import Any

import attrs
import torch

from ....ops.nodes import args_of
from ...emission.graph_builder import Builder, LocalShard
from ...rule_api.op_record import Op
from ...rule_api.strategy import Choice, OpCall, named, replicated
from .gather_scatter import read_index, zeros_elsewhere

aten = torch.ops.aten
FORWARD = aten._embedding_bag.default
FORWARD_ONLY = aten._embedding_bag_forward_only.default
BACKWARD = aten._embedding_bag_backward.default
WEIGHTS_BACKWARD = aten._embedding_bag_per_sample_weights_backward.default
SUM, MEAN, MAX = range(3)


@attrs.frozen
class Options:
    """The options of an embedding_bag call that its rule and its lowering need.

    Args:
        mode: SUM, MEAN or MAX.
        padding: the index that adds nothing; negative for none.
        is_open: whether each offset begins a bag, the last one up to the end of the indices.
        length: of each bag, where all are equally long.
    """

    mode: int
    padding: int
    is_open: bool
    length: int | None

    @property
    def may_add_parts(self) -> bool:
        """Whether ranks may each add a part of a bag: the length of a mean follows from the
        offsets.
        """
        return self.is_open and (self.mode == SUM or self.padding < 0)


def options_of(values: dict[str, Any], length: int | None) -> Options:
    """Read the options from the arguments of a call."""
    is_open = not values.get("include_last_offset", False)
    return Options(values["mode"], values["padding_idx"], is_open, length)


def options_in(call: OpCall) -> Options:
    """Read the options of a call, and whether its offsets are an arange, so that bags are
    equally long.
    """
    values = named(call.target, call.args, call.kwargs)
    o = options_of(values, None)
    offsets = values["offsets"]
    if not o.is_open or offsets.target is not aten.arange.start_step:
        return o
    n = values["indices"].meta["val"].numel()
    first, last, step, *_ = args_of(offsets)
    is_even = n > 0 and step > 0 and n % step == 0 and (first, last) == (0, n)
    return attrs.evolve(o, length=step if is_even else None)


def bags(call: OpCall) -> list[Choice]:
    """Shard embedding_bag over features, table rows (a Partial sum), or bags."""
    o = options_in(call)
    weights = len(call.ins) - 3
    others = ("R",) * (2 + weights)
    most = 1 if o.mode == MAX else "R"
    choices: list[Choice] = [replicated(call), ((1, *others), (1, "R", "R", most))]
    if o.mode == MAX:
        return choices
    choices.append((("sum", *others), ("sum", "R", "R", "R")))
    if o.is_open:
        choices.append(((0, *others), ("sum", "R", "R", "R")))
    if o.length:
        index = (0, o.length)
        choices.append((("R", index, 0, *(index,) * weights), (0, "R", 0, 0)))
    elif o.may_add_parts:
        choices.append((("R", 0, "R", *(0,) * weights), ("sum", 0, "R", "R")))
    return choices


def bags_backward(call: OpCall) -> list[Choice]:
    """Shard the table's gradient over features, or over bags or indices as a Partial sum."""
    o = options_in(call)
    weights = len(call.ins) - 6
    most = 1 if o.mode == MAX else "R"
    choices = [replicated(call)]
    if call["sparse"]:
        return choices
    choices.append(((1, "R", "R", "R", "R", most, *("R",) * weights), (1,)))
    if o.mode == MAX:
        return choices
    others = ("R",) * (5 + weights)
    choices.append((("sum", *others), ("sum",)))
    if call["scale_grad_by_freq"] or not _is_open(call.ins[0], call.ins[2]):
        return choices
    choices.append(((0, *others), ("sum",)))
    if o.length:
        index = (0, o.length)
        choices.append(((0, index, 0, "R", 0, 0, *(index,) * weights), ("sum",)))
    elif o.may_add_parts:
        choices.append((("R", 0, "R", 0, "R", "R", *(0,) * weights), ("sum",)))
    return choices


def weights_backward(call: OpCall) -> list[Choice]:
    """Shard the gradient of per_sample_weights."""
    choices = [
        replicated(call),
        ((1, 1, "R", "R", "R"), ("sum",)),
        (("sum", "R", "R", "R", "R"), ("sum",)),
        (("R", "sum", "R", "R", "R"), ("sum",)),
    ]
    if not _is_open(call.ins[0], call.ins[3]):
        return choices
    choices += [(("R", 0, "R", "R", "R"), ("sum",)), ((0, "R", "R", "R", "R"), ("sum",))]
    length = options_in(call).length
    if length:
        choices.append(((0, "R", (0, length), 0, "R"), ((0, length),)))
    else:
        choices.append((("R", "R", 0, "R", 0), (0,)))
    return choices


def _is_open(grad: torch.Tensor, offsets: torch.Tensor) -> bool:
    """Return whether each offset begins a bag."""
    return grad.shape[0] == offsets.shape[0]


class Bags:
    """The bags that a rank computes, and the ops that compute them.

    Args:
        b: the builder.
        values: the arguments of the call by name.
        indices: the rank's.
        offsets: where bags begin, in the global indices.
    """

    def __init__(
        self, b: Builder, values: dict[str, Any], indices: LocalShard, offsets: LocalShard
    ) -> None:
        self.b, self.indices, self.offsets = b, indices, offsets
        is_even = offsets.is_sharded(0)
        self.o = options_of(values, indices.shape[0] // offsets.shape[0] if is_even else None)
        self.count = indices.local_shape[0]  # of the rank's indices
        # whether the rank has some of the indices of bags of any length
        self.are_parts = not is_even and indices.is_sharded(0)

    @property
    def number(self) -> int:
        """The number of the rank's bags."""
        if self.o.length:
            return self.count // self.o.length
        return self.offsets.shape[0] - (not self.o.is_open)

    def floor(self, x: Any) -> Any:
        """Emit the bag numbers of positions, where bags are equally long."""
        return self.b.call(aten.div.Tensor_mode, x, self.o.length, rounding_mode="floor")

    def bags_of(self, n: int, start: Any = None) -> Any:
        """Emit the bag number of each of n indices, from a start on."""
        device = self.indices.node.meta["val"].device
        places = self.b.call(aten.arange.default, n, device=device)
        if self.o.length:
            bags = self.floor(places)
            return bags if start is None else self.b.call(aten.add.Tensor, bags, self.floor(start))
        if start is not None:
            places = self.b.call(aten.add.Tensor, places, start)
        after = self.b.call(aten.searchsorted.Tensor, self.offsets.node, places, right=True)
        return self.b.call(aten.sub.Tensor, after, 1)

    def global_bags(self) -> Any:
        """Emit the global bag number of each of the rank's indices."""
        start = self.b.offset(self.indices, 0) if self.indices.is_sharded(0) else None
        return self.bags_of(self.count, start)

    def local_bags(self) -> Any:
        """Emit the local bag number of each of the rank's indices."""
        return self.bags_of(self.count) if self.o.length else self.global_bags()

    def is_read(self) -> Any:
        """Emit the mask of indices that are not padding; None without padding."""
        if self.o.padding < 0:
            return None
        return self.b.call(aten.ne.Scalar, self.indices.node, self.o.padding)

    def lengths(self) -> Any:
        """Emit the number of indices in each of the rank's bags."""
        b = self.b
        starts = self.offsets.node
        if self.are_parts:
            end = b.call(aten.new_full.default, starts, [1], self.indices.shape[0])
            after = b.call(aten.slice.Tensor, starts, 0, 1)
            return b.call(aten.sub.Tensor, b.call(aten.cat.default, [after, end]), starts)
        read = self.is_read()
        if read is None:
            read = b.call(aten.ones_like.default, self.indices.node)
        return self.added(b.call(aten._to_copy.default, read, dtype=torch.int64))

    def added(self, values: Any) -> Any:
        """Emit the sum of per-index values in each bag."""
        like = values.meta["val"]
        shape = [self.number, *like.shape[1:]]
        zeros = self.b.call(aten.zeros.default, shape, dtype=like.dtype, device=like.device)
        return self.b.call(aten.index_add.default, zeros, 0, self.local_bags(), values)

    def selected(self, x: LocalShard, at: Any) -> Any:
        """Emit one row of a shard per index, with zeros for other ranks' rows and for padding."""
        b = self.b
        mask = self.is_read()
        if x.is_sharded(0):
            hit, at = read_index(b, x, 0, at)
            mask = hit if mask is None else b.call(aten.logical_and.default, hit, mask)
        if not x.local_shape[0]:
            return b.call(aten.new_zeros.default, x.node, [self.count, x.local_shape[1]])
        rows = b.call(aten.index_select.default, x.node, 0, at)
        return rows if mask is None else zeros_elsewhere(b, self.column(mask), rows)

    def column(self, x: Any) -> Any:
        """Emit a vector as a column."""
        return self.b.call(aten.unsqueeze.default, x, -1)

    def scaled(self, rows: Any, weights: list[LocalShard]) -> Any:
        """Emit rows times per_sample_weights, if there are any."""
        if not weights:
            return rows
        return self.b.call(aten.mul.Tensor, rows, self.column(weights[0].node))

    def divided(self, sums: Any, lengths: Any) -> Any:
        """Emit means from sums; an empty bag stays zero."""
        least = self.b.call(aten.clamp.default, lengths, 1)
        return self.b.call(aten.div.Tensor, sums, self.column(least))


def lower_bags(
    b: Builder, args: list[Any], kwargs: dict[str, Any], shards: list[LocalShard], target: Any
) -> Any:
    """Compute embedding_bag on a rank's shards, with zeros for other ranks' rows."""
    table, indices, offsets, *weights = shards
    is_empty = 0 in table.local_shape or 0 in indices.local_shape
    if not (table.is_sharded(0) or indices.is_sharded(0) or is_empty):
        return b.call(target, *args, **kwargs)
    bags = Bags(b, named(target, args, kwargs), indices, offsets)
    rows = bags.scaled(bags.selected(table, indices.node), weights)
    out = bags.added(rows)
    lengths = bags.lengths()
    if bags.o.mode == MEAN:
        out = bags.divided(out, lengths)
    if bags.o.mode == SUM:
        lengths = b.call(aten.zeros_like.default, lengths)
    most = lengths
    if bags.o.mode == MAX:
        shape = [bags.number, table.local_shape[1]]
        most = b.call(aten.new_zeros.default, lengths, shape)
    bag_of = bags.global_bags() if bags.are_parts else bags.bags_of(indices.shape[0])
    dtype = indices.node.meta["val"].dtype
    results = [b.call(aten._to_copy.default, x, dtype=dtype) for x in (bag_of, lengths, most)]
    for i, is_empty in enumerate(_are_empty(b, target, args, kwargs, shards)):
        if is_empty:
            results[i] = b.call(aten.new_empty.default, results[i], [0])
    return [out, *results]


def _are_empty(
    b: Builder, target: Any, args: list[Any], kwargs: dict[str, Any], shards: list[LocalShard]
) -> list[bool]:
    """Return which auxiliary outputs of embedding_bag torch leaves empty: it depends on mode,
    dtype and device.
    """
    shapes = {shard.node: shard.shape for shard in shards}
    fake = lambda x: x.meta["val"].new_empty(shapes[x]) if x in shapes else x.meta["val"]
    with b.mode:
        args, kwargs = torch.fx.node.map_arg((args, kwargs), fake)
        _, *results = target(*args, **kwargs)
    return [tuple(x.shape) == (0,) for x in results]


def lower_backward(
    b: Builder, args: list[Any], kwargs: dict[str, Any], shards: list[LocalShard]
) -> Any:
    """Compute the table's gradient from a rank's bags."""
    grad, indices, offsets, _, _, _, *weights = shards
    if not (grad.is_sharded(0) or indices.is_sharded(0)):
        return b.call(BACKWARD, *args, **kwargs)
    values = named(BACKWARD, args, kwargs)
    bags = Bags(b, values, indices, offsets)
    rows = bags.selected(grad, bags.global_bags())
    if bags.o.mode == MEAN:
        lengths = bags.lengths()
        each = b.call(aten.index_select.default, lengths, 0, bags.local_bags())
        rows = bags.divided(rows, each)
    rows = bags.scaled(rows, weights)
    number = values["num_weights"]
    return b.call(aten.embedding_dense_backward.default, rows, indices.node, number, -1, False)


def lower_weights_backward(
    b: Builder, args: list[Any], kwargs: dict[str, Any], shards: list[LocalShard]
) -> Any:
    """Compute the gradient of per_sample_weights from a rank's rows and bags."""
    grad, table, indices, offsets, _ = shards
    if not (grad.is_sharded(0) or table.is_sharded(0) or indices.is_sharded(0)):
        return b.call(WEIGHTS_BACKWARD, *args, **kwargs)
    bags = Bags(b, named(WEIGHTS_BACKWARD, args, kwargs), indices, offsets)
    gradients = bags.selected(grad, bags.global_bags())
    product = b.call(aten.mul.Tensor, gradients, bags.selected(table, indices.node))
    return b.call(aten.sum.dim_IntList, product, [1])


# A rank with an empty shard runs the forward, too: not all of its results are empty then.
TABLE: dict[object, Op] = {
    **{
        op: Op(bags, lower=functools.partial(lower_bags, target=op), run_empty=True)
        for op in (FORWARD, FORWARD_ONLY)
    },
    BACKWARD: Op(bags_backward, lower=lower_backward),
    WEIGHTS_BACKWARD: Op(weights_backward, lower=lower_weights_backward),
}
