"""DTensors on a part of a mesh, as `mesh["tp"]`, by the local tensors of all ranks of the mesh."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate

from .. import _compat
from .dtensor import dtensors
from .local_tensor import of_every_part


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
    (made,) = dtensors([own_of_part(x)], [spec])
    return made


def own_of_part(x: DTensor) -> torch.Tensor:
    """Return the local tensors, over the root mesh, of a DTensor on a submesh."""
    return of_every_part(_compat.local_tensor(x), x.device_mesh)
