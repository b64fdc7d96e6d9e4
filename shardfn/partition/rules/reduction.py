"""Ops that reduce dims, or work along one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..emission.graph_builder import Builder, LocalShard
from ..rule_api.op_record import Op
from ..rule_api.strategy import Choice, OpCall, Rule, replicated, together
from .dtypes import keeps_values, reduces

aten = torch.ops.aten


def _reduced(call: OpCall, position: int, default: int | None) -> set[int]:
    """Return the dims that a call reduces."""
    (x,) = call.ins
    dims = call.arg(position, "dim", default)
    if isinstance(dims, int):
        dims = [dims]
    return {d % max(x.dim(), 1) for d in dims} if dims else set(range(x.dim()))


def reduction(partial: str | None, position: int = 1, default: int | None = None) -> Rule:
    """Make the rule of a reduction: a sharded reduced dim gives a Partial result, other dims
    stay sharded.
    """

    def rule(call: OpCall) -> list[Choice]:
        (x,), out = call.ins, call.outs[0]
        reduced = _reduced(call, position, default)
        keep = out.dim() == x.dim() and x.dim() > 0
        choices: list[Choice] = [replicated(call)]
        for d in range(x.dim()):
            if d not in reduced:
                kept = d if keep else d - sum(r < d for r in reduced)
                choices.append(((d,), (kept,) * len(call.outs)))
            elif partial and (partial == "sum" or reduces(x.dtype)):
                choices.append(((d,), (partial,)))
        if partial == "sum" and keeps_values(x.dtype, out.dtype):
            choices.append((("sum",), ("sum",)))
        return choices

    return rule


def along(position: int, name: str = "dim", default: int = -1, linear: Sequence[int] = ()) -> Rule:
    """Make the rule of an op that works along one dim, such as a softmax: it shards every other
    dim.
    """

    def rule(call: OpCall) -> list[Choice]:
        n = call.ins[0].dim()
        dim = call.arg(position, name, default) % max(n, 1)
        choices = [replicated(call), *together(call, [d for d in range(n) if d != dim])]
        partial = ("sum",) * len(call.outs)
        linear_in = linear if keeps_values(call.ins[0].dtype, call.outs[0].dtype) else ()
        return choices + [
            (tuple("sum" if i == j else "R" for j in range(len(call.ins))), partial)
            for i in linear_in
        ]

    return rule


def _between_fixed_ends(call: OpCall) -> range:
    """Return the dims over which a histogram may be sharded: none if its ends depend on the
    values.
    """
    return range(call.ins[0].dim() if call.arg(2, "min", 0) != call.arg(3, "max", 0) else 0)


def lower_median(target: Any) -> Any:
    """Compute a median of a copy of an expanded input, since torch's CPU kernel reads out of
    bounds (2.13).
    """

    def lower(b: Builder, args: list[Any], kwargs: dict[str, Any], shards: list[LocalShard]) -> Any:
        value = args[0].meta["val"]
        repeats = value.dim() > 0 and value.stride(args[1]) == 0
        return b.call(target, b.contiguous(args[0]) if repeats else args[0], *args[1:], **kwargs)

    return lower


def histogram(call: OpCall) -> list[Choice]:
    """Shard a histogram; the counts of shards are a Partial sum."""
    return [replicated(call), *(((d,), ("sum",)) for d in _between_fixed_ends(call))]


row = functools.partial(Op, strided=True, of_sizes=True)
TABLE: dict[object, Op] = {
    aten.sum.default: row(reduction("sum")),
    aten.sum.dim_IntList: row(reduction("sum")),
    aten.amax.default: row(reduction("max")),
    aten.amin.default: row(reduction("min")),
    aten.prod.dim_int: row(reduction(None)),
    aten.any.dim: row(reduction(None)),
    aten.any.dims: row(reduction(None)),
    aten.all.dim: row(reduction(None)),
    aten.all.dims: row(reduction(None)),
    aten.max.dim: row(reduction(None)),
    aten.min.dim: row(reduction(None)),
    aten.argmax.default: row(reduction(None)),
    aten.argmin.default: row(reduction(None)),
    aten._softmax.default: row(along(1)),
    aten._softmax_backward_data.default: row(along(2, linear=(0,))),
    aten._log_softmax.default: row(along(1)),
    aten._log_softmax_backward_data.default: row(along(2)),
    aten.sort.default: row(along(1)),
    aten.sort.stable: row(along(2)),
    aten.kthvalue.default: row(reduction(None, 2, -1)),
    aten.median.dim: row(reduction(None), lower=lower_median(aten.median.dim), strided=False),
    aten.nanmedian.dim: row(reduction(None), lower=lower_median(aten.nanmedian.dim), strided=False),
    aten.mode.default: row(reduction(None, 1, -1)),
    aten.histc.default: row(histogram),
    aten.topk.default: row(along(2)),
}
