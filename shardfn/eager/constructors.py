"""torch's own constructors of DTensors, which make tensors for all ranks of a simulated world."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .. import _compat, _tree
from ..simulated import SimulatedDTensor, SimulatedTensor, UnreadTensor, of_one_part, shown
from . import collectives, fully_sharded
from .dtensor import AllRanks

SOURCE = "src_data_rank"  # of the calls that shard or replicate a tensor
PLAIN = (torch.Tensor, torch.nn.Parameter)


@contextlib.contextmanager
def constructors_simulated() -> Iterator[None]:
    """Make DTensor.from_local, distribute_tensor and torch.distributed.tensor's factories work for
    all simulated ranks inside this context.
    """
    patched = _compat.patched(
        "simulated world",
        made=made,
        on_all_ranks=on_all_ranks,
        fully_sharded=fully_sharded,
        communicated=collectives.run,
    )
    classes: list[Any] = [SimulatedDTensor, SimulatedTensor]
    with patched, torch.serialization.safe_globals(classes):
        yield


def constructors_unread() -> AbstractContextManager[None]:
    """Make DTensors without values, and refuse collectives of plain tensors, inside
    this context.
    """
    return _compat.patched(
        "world of shapes", made=unread, on_all_ranks=on_one_rank, communicated=collectives.refused
    )


def unread(
    construct: Callable[..., Any], cls: Any, local_tensor: Any, spec: Any, **options: Any
) -> Any:
    """DTensor's constructor, with its names. Of a plain local tensor the shape alone counts."""
    local = local_tensor
    is_torchs = cls is not DTensor or _as_torch_does()
    is_plain = type(local) in PLAIN
    if is_plain and not (is_torchs or local.is_meta):
        local = UnreadTensor(local.detach())
    return construct(cls, local, spec, **options)


def on_one_rank(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wrap a function that shards or replicates a tensor which all ranks hold, so that nothing is
    sent.
    """
    if _as_torch_does():
        return fn(*args, **kwargs)
    call = inspect.signature(fn).bind(*args, **kwargs)
    call.apply_defaults()
    if SOURCE in call.arguments:
        call.arguments[SOURCE] = None
    return fn(*call.args, **call.kwargs)


def made(
    construct: Callable[..., Any], cls: Any, local_tensor: Any, spec: Any, **options: Any
) -> Any:
    """DTensor's constructor, with its names. A plain local tensor is that of each rank."""
    local = local_tensor
    if cls is not DTensor or _as_torch_does():
        return construct(cls, local, spec, **options)
    if type(local) in PLAIN:
        rest = [local.detach().clone() for _ in range(spec.mesh.size() - 1)]
        local = SimulatedTensor([local.detach(), *rest], shown(spec.mesh))
    local = of_one_part(local, spec.mesh)
    kind = SimulatedDTensor if isinstance(local, SimulatedTensor) else cls
    return construct(kind, local, spec, **options)


def on_all_ranks(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wrap a torch function whose result depends on the rank to run for all ranks of its mesh."""
    if _as_torch_does():
        return fn(*args, **kwargs)
    leaves = _tree.leaves((args, kwargs))
    meshes = (mesh for mesh in map(_mesh_of, leaves) if mesh is not None)
    with _compat.one_thread():
        mesh = next(meshes)
        ranks = AllRanks(mesh, shown(mesh))
        args, kwargs = _from_source(fn, mesh, args, kwargs)
        given = _tree.tree_map(ranks.copied, (args, kwargs))
        args, kwargs = ranks.entering(given)
        with ranks.running():
            return ranks.leaving(fn(*args, **kwargs))


def _mesh_of(x: Any) -> DeviceMesh | None:
    """Return the mesh that an argument is or has, as a spec has one."""
    if isinstance(x, DeviceMesh):
        return x
    mesh = getattr(x, "mesh", None)
    return mesh if isinstance(mesh, DeviceMesh) else None


def _from_source(fn: Any, mesh: DeviceMesh, args: Any, kwargs: Any) -> Any:
    """The arguments of a call that sends the tensor of one rank of each group, with that tensor
    for each rank instead. torch sends it from rank 0 of the world alone (torch 2.13).
    """
    call = inspect.signature(fn).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    source = given.get(SOURCE)
    if source is None:
        return args, kwargs
    given[SOURCE] = None
    tensor = given["tensor"]
    if isinstance(tensor, SimulatedTensor):
        every = torch.arange(mesh.size()).view(mesh.shape)
        dim = given["mesh_dim"]
        kept = every.select(dim, source).unsqueeze(dim).expand_as(every)
        own: Any = of_one_part(tensor, mesh)
        shards = [own.shards[k].clone() for k in kept.flatten().tolist()]
        given["tensor"] = SimulatedTensor(shards, own.shown)
    return call.args, call.kwargs


def _as_torch_does() -> bool:
    """Return whether torch already runs for all ranks, or a capture is going on that refuses new
    DTensors.
    """
    return _compat.runs_on_all_ranks() or _compat.is_capturing()
