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

from ...emission.builder import Builder, Piece
from ...rule_api.op import Op
from ...rule_api.strategy import Choice, OpCall, replicated
from .counted import along
from .reads import hits, zeros_elsewhere

aten = torch.ops.aten
MASKS = (torch.bool, torch.uint8)  # dtypes of indices that are masks


@attrs.frozen
class Indexed:
    """Which dims of a tensor are indexed, and where dims stand in the indexed result.

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
        """(dim, dim of the result) for each dim that is not indexed."""
        rest = [d for d in range(self.n) if d not in self.dims]
        return [(d, k if k < self.lead else k + self.wide) for k, d in enumerate(rest)]


def indexed(call: OpCall) -> Indexed:
    """The dims of an indexing call. Indices with a gap between them come first in its result."""
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
    """The dims of the first tensor that an index numbers."""
    return [d for d, i in enumerate(call.args[1]) if i is not None]


def indices_of(call: OpCall, leading: int) -> list[torch.Tensor]:
    """The index tensors of a call, after so many other tensors."""
    count = sum(i is not None for i in call.args[1])
    return list(call.ins[leading : leading + count])


def index(call: OpCall) -> list[Choice]:
    """Shards dims that are not indexed, or dims of the indices. Sharding an indexed dim gives a
    Partial sum.
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
        marks = index_marks(indices, at.wide, d)
        choices.append((("R", *marks), (at.lead + d,)))
    return choices


def _every_element(call: OpCall, indices: list[torch.Tensor], at: Indexed) -> list[Choice]:
    """Shards a dim and its index together, where the index is all numbers of the dim in order,
    along a dim of its own. Masks of models are read so.
    """
    nodes = [i for i in call.args[1] if i is not None]
    choices: list[Choice] = []
    for k, (node, d) in enumerate(zip(nodes, at.dims, strict=True)):
        dim = along(node, call.ins[0].shape[d])
        if dim is None:
            continue
        place = dim + at.wide - indices[k].dim()  # of the broadcast indices
        others = [
            i.shape[place - at.wide + i.dim()]
            for i in indices[:k] + indices[k + 1 :]
            if place - at.wide + i.dim() >= 0
        ]
        if all(n == 1 for n in others):
            marks: list[Any] = ["R"] * len(indices)
            marks[k] = dim
            choices.append(((d, *marks), (at.lead + place,)))
    return choices


def index_marks(indices: list[torch.Tensor], wide: int, d: int) -> list[Any]:
    """Shards dim d of the broadcast indices in each index that has it."""
    places = [d - wide + i.dim() for i in indices]
    pairs = list(zip(places, indices, strict=True))
    single = all(p < 0 or i.shape[p] == 1 for p, i in pairs)
    marks: list[Any] = []
    for p, i in pairs:
        broadcast = p < 0 or (i.shape[p] == 1 and not single)
        marks.append("R" if broadcast else p)
    return marks


def lower_index(b: Builder, args: list[Any], kwargs: dict[str, Any], pieces: list[Piece]) -> Any:
    """Reads the local shard, with zeros for elements of other ranks."""
    table, *numbers = pieces
    x, indices = args
    own = list(indices)
    here: list[Any] = []
    dims = [d for d, at in enumerate(indices) if at is not None]
    for dim, number in zip(dims, numbers, strict=True):
        if not table.cuts(dim):
            continue
        if _follows(table, dim, number):
            own[dim] = b.call(aten.sub.Tensor, indices[dim], b.offset(table, dim))
            continue
        at = counted_from_start(b, indices[dim], table.shape[dim])
        hit, shifted = hits(b, table, dim, at)
        own[dim] = b.call(aten.mul.Tensor, shifted, hit)
        here.append(hit)
    read = b.call(aten.index.Tensor, x, own)
    return _where(b, here, read, indices, len(table.shape)) if here else read


def _follows(table: Piece, dim: int, number: Piece) -> bool:
    """Whether an index is sharded over all axes that shard its dim: then it counts the elements
    of the shard.
    """
    pairs = zip(table.marks, number.marks, strict=True)
    return all(n != "R" for t, n in pairs if t == dim or _cuts(t, dim))


def _cuts(mark: Any, dim: int) -> bool:
    return isinstance(mark, tuple) and mark[0] == dim


def _where(b: Builder, here: list[Any], read: Any, indices: Sequence[Any], n: int) -> Any:
    """The elements read, with zeros where some index is not of this rank."""
    both = lambda x, y: b.call(aten.logical_and.default, x, y)
    hit = reduce(both, here)
    dims = [d for d, at in enumerate(indices) if at is not None]
    has_gap = dims[-1] - dims[0] >= len(dims)
    after = n - len(dims) if has_gap else n - 1 - dims[-1]
    for _ in range(after):
        hit = b.call(aten.unsqueeze.default, hit, -1)
    return zeros_elsewhere(b, hit, read)


def counted_from_start(b: Builder, at: Any, size: int) -> Any:
    """An index without negative numbers."""
    is_negative = b.call(aten.lt.Scalar, at, 0)
    from_end = b.call(aten.add.Tensor, at, size)
    return b.call(aten.where.self, is_negative, from_end, at)


TABLE: dict[object, Op] = {
    aten.index.Tensor: Op(index, lower=lower_index, numbered_dims=indexed_dims)
}
