"""Indexing by tensors of numbers, `x[..., i, j, ...]`.

As in an embedding, elements of other ranks read as zeros where an indexed dim is sharded, so
the result is a Partial sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import attrs
import torch

from ...emission.graph_builder import Builder, LocalShard
from ...rule_api.op_record import Op
from ...rule_api.strategy import Choice, OpCall, replicated
from .gather_scatter import read_index, zeros_elsewhere

aten = torch.ops.aten
MASKS = (torch.bool, torch.uint8)  # dtypes of indices that are masks
ARANGES: set[object] = {aten.arange.default, aten.arange.start, aten.arange.start_step}
WIDE = 4  # bytes of a number that holds every index
# Ops that keep the elements of an index in their order.
COPIES = {aten.unsqueeze.default, aten.view.default, aten.alias.default, aten._to_copy.default}


@attrs.frozen
class Indexed:
    """Which dims of a tensor `x[i, j]` indexes, and where the index dims are in the result.

    Args:
        dims: the indexed dims of the tensor.
        lead: the first of the result's dims that come from the indices.
        wide: how many of them there are.
        n: the number of dims of the tensor.
    """

    dims: tuple[int, ...]
    lead: int
    wide: int
    n: int

    @property
    def others(self) -> list[tuple[int, int]]:
        """The pairs (dim of x, dim of the result) of the dims that are not indexed."""
        rest = [d for d in range(self.n) if d not in self.dims]
        return [(d, k if k < self.lead else k + self.wide) for k, d in enumerate(rest)]


def indexed(call: OpCall) -> Indexed:
    """Describe which dims a call indexes."""
    dims = indexed_dims(call)
    first, *_ = dims
    has_gap = dims != list(range(first, first + len(dims)))
    return Indexed(
        dims=tuple(dims),
        lead=0 if has_gap else first,
        wide=max(i.dim() for i in indices_of(call, 1)),
        n=call.ins[0].dim(),
    )


def indexed_dims(call: OpCall) -> list[int]:
    """List the dims that a call indexes."""
    return [d for d, i in enumerate(call.args[1]) if i is not None]


def indices_of(call: OpCall, leading: int) -> list[torch.Tensor]:
    """List the index tensors of a call."""
    count = sum(i is not None for i in call.args[1])
    return list(call.ins[leading : leading + count])


def index(call: OpCall) -> list[Choice]:
    """Shard `x[i, j]` over other dims or index dims; sharding an indexed dim gives a Partial
    sum.
    """
    indices = indices_of(call, 1)
    if any(i.dtype in MASKS for i in indices):
        return [replicated(call)]
    at = indexed(call)
    whole = ("R",) * len(indices)
    choices = [replicated(call), (("sum", *whole), ("sum",))]
    choices += [((d, *whole), (place,)) for d, place in at.others]
    follow = _every_element(call, indices, at)
    counted = {row[0] for row, _ in follow}
    choices += follow
    choices += [((d, *whole), ("sum",)) for d in at.dims if d not in counted]
    for d in range(at.wide):
        placements = index_placements(indices, at.wide, d)
        choices.append((("R", *placements), (at.lead + d,)))
    return choices


def _every_element(call: OpCall, indices: list[torch.Tensor], at: Indexed) -> list[Choice]:
    """Shard a dim together with its index, where the index is an arange over the whole dim, as
    in masks.
    """
    nodes = [i for i in call.args[1] if i is not None]
    choices: list[Choice] = []
    for k, (node, d) in enumerate(zip(nodes, at.dims, strict=True)):
        dim = counts_along(node, call.ins[0].shape[d])
        if dim is None:
            continue
        place = dim + at.wide - indices[k].dim()  # of the broadcast indices
        others = [
            i.shape[place - at.wide + i.dim()]
            for i in indices[:k] + indices[k + 1 :]
            if place - at.wide + i.dim() >= 0
        ]
        if all(n == 1 for n in others):
            placements: list[Any] = ["R"] * len(indices)
            placements[k] = dim
            choices.append(((d, *placements), (at.lead + place,)))
    return choices


def counts_along(node: torch.fx.Node, size: int) -> int | None:
    """Return the dim along which an index tensor is an arange of a size; None if the graph does
    not prove one.
    """
    value = node.meta["val"]
    wide = [d for d, n in enumerate(value.shape) if n != 1]
    if value.numel() != size or len(wide) != 1:
        return None
    while node.target in COPIES or _adds_zero(node):
        if node.meta["val"].dtype.itemsize < WIDE:
            return None
        node = node.all_input_nodes[0]
    return wide[0] if _counts(node, size) else None


def _counts(node: torch.fx.Node, size: int) -> bool:
    """Return whether a node is an arange from 0 to a size."""
    first = (size,) if node.target is aten.arange.default else (0, size)
    is_by_ones = node.args[len(first) :] in ((), (1,))
    return node.target in ARANGES and node.args[: len(first)] == first and is_by_ones


def _adds_zero(node: torch.fx.Node) -> bool:
    """Return whether a node adds zero."""
    is_number = len(node.all_input_nodes) == 1
    return node.target is aten.add.Tensor and is_number and node.args[1:] == (0,)


def index_placements(indices: list[torch.Tensor], wide: int, d: int) -> list[Any]:
    """Shard one dim of the broadcast indices in each index that has it."""
    places = [d - wide + i.dim() for i in indices]
    pairs = list(zip(places, indices, strict=True))
    single = all(p < 0 or i.shape[p] == 1 for p, i in pairs)
    placements: list[Any] = []
    for p, i in pairs:
        broadcast = p < 0 or (i.shape[p] == 1 and not single)
        placements.append("R" if broadcast else p)
    return placements


def lower_index(
    b: Builder, args: list[Any], kwargs: dict[str, Any], shards: list[LocalShard]
) -> Any:
    """Index the local shard, with zeros for other ranks' elements."""
    table, *numbers = shards
    x, indices = args
    own = list(indices)
    here: list[Any] = []
    dims = [d for d, at in enumerate(indices) if at is not None]
    for dim, number in zip(dims, numbers, strict=True):
        if not table.is_sharded(dim):
            continue
        if _follows(table, dim, number):
            own[dim] = b.call(aten.sub.Tensor, indices[dim], b.offset(table, dim))
            continue
        at = counted_from_start(b, indices[dim], table.shape[dim])
        hit, own[dim] = read_index(b, table, dim, at)
        here.append(hit)
    read = b.call(aten.index.Tensor, x, own)
    return _where(b, here, read, indices, len(table.shape)) if here else read


def _follows(table: LocalShard, dim: int, number: LocalShard) -> bool:
    """Return whether an index is sharded like its dim, so that it counts the shard's elements."""
    pairs = zip(table.placements, number.placements, strict=True)
    return all(n != "R" for t, n in pairs if t == dim or _cuts(t, dim))


def _cuts(placement: Any, dim: int) -> bool:
    """Return whether a placement shards a dim in units or blocks."""
    return isinstance(placement, tuple) and placement[0] == dim


def _where(b: Builder, here: list[Any], read: Any, indices: Sequence[Any], n: int) -> Any:
    """Replace elements with an index on another rank by zeros."""
    both = lambda x, y: b.call(aten.logical_and.default, x, y)
    hit = reduce(both, here)
    dims = [d for d, at in enumerate(indices) if at is not None]
    has_gap = dims[-1] - dims[0] >= len(dims)
    after = n - len(dims) if has_gap else n - 1 - dims[-1]
    for _ in range(after):
        hit = b.call(aten.unsqueeze.default, hit, -1)
    return zeros_elsewhere(b, hit, read)


def counted_from_start(b: Builder, at: Any, size: int) -> Any:
    """Turn negative indices into positive ones."""
    is_negative = b.call(aten.lt.Scalar, at, 0)
    from_end = b.call(aten.add.Tensor, at, size)
    return b.call(aten.where.self, is_negative, from_end, at)


TABLE: dict[object, Op] = {
    aten.index.Tensor: Op(index, lower=lower_index, numbered_dims=indexed_dims)
}
