"""Random numbers: a rank makes those of its shard, which are what one device would make there."""

from __future__ import annotations

from typing import Any

import torch

from ...ops.random_bits import RANDOM_BITS
from ..emission.graph_builder import Builder, LocalShard
from ..rule_api.op_record import Op
from ..rule_api.strategy import Choice, OpCall, replicated

aten = torch.ops.aten


def random_bits(call: OpCall) -> list[Choice]:
    """Shard random bits over any dim of the result, and keys with them."""
    key, *starts = call.ins
    batch = key.dim() - 1
    dims = call.outs[0].dim()
    choices = [replicated(call)]
    for d in range(dims):
        own = tuple(d if d < batch and x.dim() > d and x.shape[d] > 1 else "R" for x in starts)
        choices.append(((d if d < batch else "R", *own), (d,)))
    return choices


def make_shard(b: Builder, args: list[Any], out: LocalShard) -> Any:
    """Draw a rank's shard of random bits, starting at its first global element."""
    key, start, size, stride, *rest = args
    batch = len(out.shape) - len(size)
    for d, step in enumerate(stride, batch):
        if out.is_sharded(d):
            offset = b.call(aten.mul.Tensor, b.offset(out, d), step)
            start = offset if start is None else b.call(aten.add.Tensor, start, offset)
    local = list(out.local_shape[batch:])
    return b.call(RANDOM_BITS, key, start, local, stride, *rest)


TABLE: dict[object, Op] = {RANDOM_BITS: Op(random_bits, lower_at=make_shard)}
