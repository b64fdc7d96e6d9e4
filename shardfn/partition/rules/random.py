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
    """Draw a rank's shard of random bits, each of its runs starting at its first global element."""
    _, start, size, *_ = args
    batch = len(out.shape) - len(size)
    return _drawn(b, args, out, start, list(out.local_shape[batch:]), 0)


def _drawn(
    b: Builder, args: list[Any], out: LocalShard, start: Any, sizes: list[int], place: int
) -> Any:
    """Draw the runs of a rank's shard along the dims from a place on, and join them.

    Args:
        b: the builder.
        args: of the op.
        out: the shard.
        start: the global element that the runs of the dims before begin at.
        sizes: of the runs of these dims, and of the shard in the others.
        place: of the first of the others.
    """
    key, _, size, stride, *rest = args
    if place == len(size):
        return b.call(RANDOM_BITS, key, start, sizes, stride, *rest)
    dim = len(out.shape) - len(size) + place
    if not out.is_sharded(dim):
        return _drawn(b, args, out, start, sizes, place + 1)
    offsets = b.runs(out, dim)
    inside = [*sizes[:place], sizes[place] // len(offsets), *sizes[place + 1 :]]
    runs = []
    for offset in offsets:
        moved = b.call(aten.mul.Tensor, offset, stride[place])
        begin = moved if start is None else b.call(aten.add.Tensor, start, moved)
        runs.append(_drawn(b, args, out, begin, inside, place + 1))
    return b.call(aten.cat.default, runs, dim) if len(runs) > 1 else runs[0]


TABLE: dict[object, Op] = {RANDOM_BITS: Op(random_bits, lower_at=make_shard)}
