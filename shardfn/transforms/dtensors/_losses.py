"""Losses of DTensors under torch's `loss_parallel`, whose labels may be plain tensors.

Dynamo reads this.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import loss_parallel

from ... import _compat
from ...capture.dtensors import contexts, table


@_compat.read_by_dynamo
class InLossParallel:
    """`with loss_parallel():`. Rules of shardfn compute the loss of sharded classes anyhow."""

    def __init__(self) -> None:
        pass

    def __enter__(self) -> None:
        contexts.enter_loss()

    def __exit__(self, *exc: object) -> None:
        contexts.leave_loss()


@_compat.read_by_dynamo
def in_loss_parallel() -> InLossParallel:
    """torch.distributed.tensor.parallel.loss_parallel."""
    return InLossParallel()


@_compat.read_by_dynamo
def labels(input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The labels of a loss. Plain ones are the same on all ranks, as loss_parallel takes them."""
    if not contexts.is_in_loss():
        return target
    if isinstance(target, DTensor) or not isinstance(input, DTensor):
        return target
    said = tuple([_said(p) for p in input.placements])
    contexts.refuse_sharded(said, input.dim())
    placements = [Replicate() for _ in said]
    return DTensor.from_local(target, input.device_mesh, placements)


@_compat.read_by_dynamo
def _said(p: Any) -> int | None:
    """The dim that a placement shards, if it shards one."""
    return p.dim if p.is_shard() else None


table.FUNCTIONS[loss_parallel] = in_loss_parallel
table.OF_LOSSES.update({F.cross_entropy: labels, F.nll_loss: labels})
