"""Writes by index: index_put, with numbers or with a mask."""

from __future__ import annotations

from typing import Any

import torch

from ...emission.graph_builder import Builder, LocalShard
from ...rule_api.op_record import Op
from ...rule_api.strategy import Choice, OpCall, replicated
from .gather_scatter import written_index
from .index import MASKS, Indexed, counted_from_start, index_placements, indexed, indices_of

aten = torch.ops.aten


def index_put(call: OpCall) -> list[Choice]:
    """Shard `x[i, j] = values` over other dims, or over an indexed dim of x."""
    x = call.ins[0]
    indices = indices_of(call, 1)
    values = call.ins[-1]
    if any(i.dtype in MASKS for i in indices):
        return _masked(call, indices)
    at = indexed(call)
    whole = ("R",) * len(indices)
    choices = [replicated(call)]
    for d in at.dims:
        choices.append(((d, *whole, "R"), (d,)))
    if values.dim() != x.dim() - len(at.dims) + at.wide:
        return choices
    for d, place in at.others:  # of x, of the values
        if values.shape[place] == x.shape[d]:
            choices.append(((d, *whole, place), (d,)))
    if call.arg(3, "accumulate", False):
        choices += _accumulated(values, indices, at)
    return choices


def _accumulated(values: torch.Tensor, indices: list[torch.Tensor], at: Indexed) -> list[Choice]:
    """List the strategies of an accumulating index_put: Partial values, or sharded index dims."""
    whole = ("R",) * len(indices)
    choices: list[Choice] = [(("sum", *whole, "sum"), ("sum",))]
    for d in range(at.wide):
        if values.shape[at.lead + d] != 1:
            placements = index_placements(indices, at.wide, d)
            choices.append((("sum", *placements, at.lead + d), ("sum",)))
    return choices


def _masked(call: OpCall, indices: list[torch.Tensor]) -> list[Choice]:
    """List the strategies of a write by a boolean mask."""
    x = call.ins[0]
    values = call.ins[-1]
    mask = indices[0]
    rest = x.dim() - mask.dim()
    is_one = len(indices) == 1 and call.args[1][0] is not None and mask.dim()
    if not is_one or values.dim() > rest:
        return [replicated(call)]
    choices = [replicated(call)]
    for d in range(x.dim()):
        place = d - x.dim() + values.dim()
        is_wide = d >= mask.dim() and place >= 0 and values.shape[place] != 1
        in_mask = d if d < mask.dim() else "R"
        choices.append(((d, in_mask, place if is_wide else "R"), (d,)))
    return choices


def lower_index_put(
    b: Builder, args: list[Any], kwargs: dict[str, Any], shards: list[LocalShard]
) -> Any:
    """Write into the local shard; other ranks' indices go to an extra slot that is sliced off."""
    table = shards[0]
    x, indices, *others = args
    own = list(indices)
    sharded = [
        d
        for d, at in enumerate(indices)
        if at is not None and at.meta["val"].dtype not in MASKS and table.is_sharded(d)
    ]
    for dim in sharded:
        later_dims = len(table.shape) - 1 - dim
        at = counted_from_start(b, indices[dim], table.shape[dim])
        own[dim] = written_index(b, table, dim, at)
        pads = [0, 0] * later_dims + [0, 1]
        x = b.call(aten.constant_pad_nd.default, x, pads)
    written = b.call(aten.index_put.default, x, own, *others, **kwargs)
    for dim in sharded:
        size = table.local_shape[dim]
        written = b.call(aten.slice.Tensor, written, dim, 0, size)
    return b.contiguous(written) if sharded else written


def written_dims(call: OpCall) -> list[int]:
    """List the dims that a call writes by number."""
    return [
        d for d, i in enumerate(call.args[1]) if i is not None and i.meta["val"].dtype not in MASKS
    ]


TABLE: dict[object, Op] = {
    aten.index_put.default: Op(
        index_put,
        lower=lower_index_put,
        numbered_dims=written_dims,
        decided_by_first=True,  # a rank with nothing to write still returns its shard
    )
}
