"""DTensors on a part of a mesh, as `mesh["tp"]`, by the local tensors of all ranks of the mesh."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate

from .. import _compat
from .dtensor import dtensors
from .local_tensor import SimulatedTensor, shown


def is_on_part(x: Any, mesh: Any) -> bool:
    """Return whether a tensor is a DTensor on a submesh."""
    if mesh is None or not isinstance(x, DTensor) or x.device_mesh == mesh:
        return False
    names = {*(x.device_mesh.mesh_dim_names or ())}
    is_slice = names < {*(mesh.mesh_dim_names or ())}
    return is_slice and _compat.root_mesh(x.device_mesh) == mesh


def uneven_dim(x: DTensor) -> int | None:
    """Return a dim that is sharded unevenly, or None."""
    left = list(x.shape)
    for p, n in zip(x.placements, x.device_mesh.shape, strict=True):
        dim = getattr(p, "dim", None)
        if dim is None:
            continue
        if left[dim] % n:
            return dim
        left[dim] //= n
    return None


def placements_on(x: DTensor, mesh: Any) -> tuple[Placement, ...]:
    """Extend a submesh DTensor's placements to the root mesh: replicated over the other axes."""
    names = x.device_mesh.mesh_dim_names or ()
    own = dict(zip(names, x.placements, strict=True))
    return tuple(own.get(axis, Replicate()) for axis in mesh.mesh_dim_names)


def on_mesh(x: Any, mesh: Any) -> Any:
    """Turn a DTensor on a submesh into one on the root mesh, where all submeshes hold the same;
    other tensors as they are.
    """
    if not is_on_part(x, mesh):
        return x
    placements = placements_on(x, mesh)
    spec = _compat.dtensor_spec(mesh, placements, tuple(x.shape), x.stride(), x.dtype)
    (made,) = dtensors([own_of_part(x, mesh)], [spec])
    return made


def own_of_part(x: DTensor, mesh: Any) -> torch.Tensor:
    """Return the local tensors, over the root mesh, of a DTensor on a submesh."""
    local: Any = _compat.local_tensor(x)
    if not isinstance(local, SimulatedTensor):
        return local
    here = _ranks(x.device_mesh)
    of_rank = dict(zip(here, local.shards, strict=True))
    names = x.device_mesh.mesh_dim_names or ()
    peers = [_peer(mesh, names, rank, here) for rank in _ranks(mesh)]
    every = [of_rank[rank] for rank in peers]
    return SimulatedTensor(every, shown(mesh))


def _ranks(mesh: Any) -> list[int]:
    return mesh.mesh.flatten().tolist()


def _peer(mesh: Any, names: tuple[str, ...], rank: int, here: list[int]) -> int:
    """Return the rank of a submesh with the coordinates of another rank on the submesh's axes."""
    at = _coordinates(mesh, names, rank)
    peers = (other for other in here if _coordinates(mesh, names, other) == at)
    return next(peers)


def _coordinates(mesh: Any, names: tuple[str, ...], rank: int) -> list[int]:
    (place,) = (mesh.mesh == rank).nonzero().tolist()
    rows = zip(mesh.mesh_dim_names or (), place, strict=True)
    return [k for axis, k in rows if axis in names]
