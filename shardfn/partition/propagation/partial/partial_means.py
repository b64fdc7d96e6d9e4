"""Partial means of arguments and results. Inside a program, each is a Partial sum of shares."""

from __future__ import annotations

import math

import torch

from ....types import MEAN, MeshPlacements
from ... import plan
from ...emission.graph_builder import Builder, LocalShard

aten = torch.ops.aten


def as_sums(placements: MeshPlacements) -> MeshPlacements:
    """Replace Partial means by Partial sums in placements."""
    return tuple("sum" if m == MEAN else m for m in placements)


def rescale(b: Builder, step: plan.Rescale, shards: dict[int, LocalShard]) -> None:
    """Emit a Rescale step: divide or multiply by the number of ranks, between a Partial mean
    and a sum.
    """
    before = step.source.placements
    after = step.target.placements
    shard = shards[step.source.number]
    shares = math.prod(n for n, m, k in zip(b.axes.sizes, before, after, strict=True) if m != k)
    op = aten.div.Tensor if MEAN in before else aten.mul.Tensor
    node = b.restride(b.call(op, shard.node, shares), shard.shape, shard.stride)
    shards[step.target.number] = b.shard(node, step.target.value, after)
