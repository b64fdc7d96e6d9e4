"""torch's `loss_parallel` context: losses of class-sharded DTensors, whose labels may be plain.

Dynamo reads this.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import loss_parallel

from ... import _compat
from ...capture.dtensors import mesh_contexts, replaced_calls


@_compat.read_by_dynamo
class InLossParallel:
    """Stand in for `with loss_parallel():`. Sharding rules handle sharded classes with or without
    it.
    """

    def __init__(self) -> None:
        pass

    def __enter__(self) -> None:
        mesh_contexts.enter_loss()

    def __exit__(self, *exc: object) -> None:
        mesh_contexts.leave_loss()


@_compat.read_by_dynamo
def in_loss_parallel() -> InLossParallel:
    """Replace torch.distributed.tensor.parallel.loss_parallel."""
    return InLossParallel()


@_compat.read_by_dynamo
def labels(input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Replicate the plain labels of a loss inside loss_parallel, which are equal on all ranks."""
    if not mesh_contexts.is_in_loss():
        return target
    if isinstance(target, DTensor) or not isinstance(input, DTensor):
        return target
    dims = tuple([_sharded_dim(p) for p in input.placements])
    mesh_contexts.refuse_sharded(dims, input.dim())
    placements = [Replicate() for _ in dims]
    return DTensor.from_local(target, input.device_mesh, placements)


@_compat.read_by_dynamo
def _sharded_dim(p: Any) -> int | None:
    """Return the tensor dim that a placement shards, or None."""
    return p.dim if p.is_shard() else None


replaced_calls.FUNCTIONS[loss_parallel] = in_loss_parallel
replaced_calls.OF_LOSSES.update({F.cross_entropy: labels, F.nll_loss: labels})
