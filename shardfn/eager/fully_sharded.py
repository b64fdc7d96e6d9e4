"""Modules of fully_shard that are called outside of functions: their parameters are gathered from
the shards of all ranks, and the mean of the ranks' gradients goes back to these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import _compat
from .._compat.distributed import fsdp_hooks
from ..errors import ShardError
from ..simulated import SimulatedDTensor, SimulatedTensor, dtensors, of_one_part, on_mesh, shown

Grid = list[list[list[int]]]  # of places in a mesh: by replica, shard, and place in a part


def sharded(given: torch.Tensor, layout: fsdp_hooks.Layout) -> torch.Tensor:
    """Shard an FSDP parameter for all ranks, possibly one of parallelize_module.

    Args:
        given: the parameter before.
        layout: how FSDP places it.
    """
    parts = _locals(given) if isinstance(given, DTensor) else [given]
    return _from_parts([part.detach() for part in parts], layout)


def gathered(x: Any, layout: fsdp_hooks.Layout, policy: Any) -> torch.Tensor:
    """All-gather the tensor that a module computes with: plain, or a DTensor of parallelize_module.

    Args:
        x: the parameter.
        layout: how FSDP places it.
        policy: its mixed precision.
    """
    return _Gathered.apply(x, layout, policy)


def unsharded(group: Any) -> None:
    """Simulate FSDP's all-gather of a parameter group.

    Raises:
        ShardError: the user has FSDP change gradients.
    """
    if fsdp_hooks.has_hook(group):
        fix = "use real ranks; or change the gradients after backward()"
        raise ShardError.of(
            "fully_shard", "set_all_reduce_hook is not supported in a simulated world", fix=fix
        )
    fsdp_hooks.unsharded(group, gathered)


class _Gathered(torch.autograd.Function):
    """All-gather a parameter while its module runs; its gradient is the mean over ranks."""

    @staticmethod
    def forward(ctx: Any, x: SimulatedDTensor, layout: Any, policy: Any) -> torch.Tensor:
        ctx.layout, ctx.own = layout, x.dtype
        compute, ctx.reduce = fsdp_hooks.dtypes_of(policy, x.dtype)
        shards = _locals(x)
        first = _grid(layout)[0]
        parts = [
            torch.cat([shards[row[k]] for row in first], layout.dim).to(compute)
            for k in range(len(first[0]))
        ]
        if layout.part is None:
            return parts[0]
        local = SimulatedTensor(parts, shown(layout.part.mesh))
        spec = _compat.dtensor_spec(
            layout.part.mesh,
            layout.part.placements,
            tuple(layout.part.shape),
            layout.part.tensor_meta.stride,
            compute,
        )
        return dtensors([local], [spec])[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: Any) -> Any:
        layout = ctx.layout
        terms = _terms(cotangent, layout)
        every = [
            [terms[row[k]] for rows in _grid(layout) for row in rows]
            for k in range(len(_grid(layout)[0][0]))
        ]
        factor = layout.factor or len(every[0])
        means = [sum(x.to(ctx.reduce) for x in same) / factor for same in every]
        return _from_parts([x.to(ctx.own) for x in means], layout), None, None


def _terms(cotangent: Any, layout: fsdp_hooks.Layout) -> list[torch.Tensor]:
    """Split a cotangent into the gradient of each rank."""
    if layout.part is not None:
        placed = cotangent.redistribute(placements=layout.part.placements)
        return _locals(on_mesh(placed, layout.mesh))
    own: Any = of_one_part(cotangent, layout.mesh)
    is_of_ranks = isinstance(own, SimulatedTensor)
    return list(own.shards) if is_of_ranks else [own] * layout.mesh.size()


def _from_parts(parts: list[torch.Tensor], layout: fsdp_hooks.Layout) -> DTensor:
    """Build a sharded DTensor from tensors of submesh positions."""
    grid = _grid(layout)
    count = len(grid[0])
    chunks = [_chunks(part, count, layout.dim) for part in parts]
    shards = {
        place: chunks[k][i].clone(memory_format=torch.contiguous_format)
        for rows in grid
        for i, row in enumerate(rows)
        for k, place in enumerate(row)
    }
    local = SimulatedTensor([shards[k] for k in range(len(shards))], shown(layout.mesh))
    return dtensors([local], [layout.spec])[0]


def _chunks(x: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    """Chunk a tensor into one part per rank; the last may be empty."""
    found = list(x.chunk(count, dim))
    empty = x.narrow(dim, 0, 0)
    return found + [empty] * (count - len(found))


def _grid(layout: fsdp_hooks.Layout) -> Grid:
    """Arrange a mesh's ranks by (replicate, shard, submesh) axes."""
    mesh = layout.mesh
    of_part = 0 if layout.part is None else layout.part.mesh.ndim
    places = torch.arange(mesh.size()).view(mesh.shape)
    count = mesh.shape[mesh.ndim - of_part - 1]
    size = 1 if layout.part is None else layout.part.mesh.size()
    return places.view(-1, count, size).tolist()


def _locals(x: DTensor) -> list[torch.Tensor]:
    local: Any = _compat.local_tensor(x)
    return list(local.shards)
