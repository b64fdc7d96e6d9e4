"""torch's own constructors of DTensors, which make tensors for all ranks of a simulated world."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .. import _compat, _tree
from .dtensor import AllRanks, SimulatedDTensor
from .local_tensor import SimulatedTensor, shown

PLAIN = (torch.Tensor, torch.nn.Parameter)


def constructors_simulated() -> AbstractContextManager[None]:
    """A context in which DTensor.from_local, distribute_tensor and the factories of
    torch.distributed.tensor make tensors for all ranks.
    """
    return _compat.patched(
        "simulated world",
        made=made,
        on_all_ranks=on_all_ranks,
        dispatched=dispatched,
    )


def made(
    construct: Callable[..., Any],
    cls: Any,
    local_tensor: Any,
    spec: Any,
    **options: Any,
) -> Any:
    """DTensor's constructor, with its names. A plain local tensor is that of each rank."""
    local = local_tensor
    if cls is not DTensor or _as_torch_does():
        return construct(cls, local, spec, **options)
    if type(local) in PLAIN:
        rest = [local.detach().clone() for _ in range(spec.mesh.size() - 1)]
        local = SimulatedTensor([local.detach(), *rest], shown(spec.mesh))
    kind = SimulatedDTensor if isinstance(local, SimulatedTensor) else cls
    return construct(kind, local, spec, **options)


def on_all_ranks(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call of a function of torch's that depends on the rank, for all ranks of its mesh."""
    if _as_torch_does():
        return fn(*args, **kwargs)
    meshes = (x for x in _tree.leaves((args, kwargs)) if isinstance(x, DeviceMesh))
    with _compat.one_thread():
        mesh = next(meshes)
        ranks = AllRanks(mesh, shown(mesh))
        given = _tree.tree_map(ranks.copied, (args, kwargs))
        args, kwargs = ranks.entering(given)
        with ranks.running():
            return ranks.leaving(fn(*args, **kwargs))


def dispatched(func: Any, args: Any, kwargs: Any) -> Any:
    """An op as SimulatedDTensor computes it; NotImplemented without such a tensor."""
    leaves = _tree.leaves((args, kwargs))
    if not any(isinstance(x, SimulatedDTensor) for x in leaves):
        return NotImplemented
    return SimulatedDTensor.__torch_dispatch__(func, (), args, kwargs)


def _as_torch_does() -> bool:
    """Whether torch runs for all ranks already, or a capture refuses DTensors that are made."""
    return _compat.runs_on_all_ranks() or _compat.is_capturing()
