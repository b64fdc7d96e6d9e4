"""Arguments as programs take them: arrived, and with DTensors inside of the tensors that hold
others.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch.distributed.tensor import DTensor

from ... import _compat, _tree
from ...errors import TreeError
from ...mesh import current_mesh
from ...simulated import SimulatedTensor, dtensors, is_on_part, on_mesh, shown
from ...world import current_world
from ..options import Request
from .checks import refuse_lost_gradient, refuse_lost_tangent

OF_PART = "_of_part"  # set on a DTensor of the mesh that was one on a part of it


def is_prepared(leaves: list[Any], mesh: Any = None) -> bool:
    """Whether a program takes all these arguments as they are.

    Args:
        leaves: of the arguments.
        mesh: of a program of global tensors, which takes no DTensors on parts of it.
    """
    if any(map(_is_other, leaves)):
        return False
    return not any(is_on_part(x, mesh) for x in leaves)


def prepared(name: str, args: Any, kwargs: Any, mesh: Any = None) -> tuple[Any, Any]:
    """Arguments in the form that programs take.

    Args:
        name: of the function, for errors.
        args: positional arguments.
        kwargs: keyword arguments.
        mesh: of a program of global tensors: DTensors on a part of it become DTensors on it.

    Raises:
        TreeError: a DTensor of tensors that hold others of another shape.
        ShardError: autograd follows a DTensor on a part of the mesh.
    """
    _tree.learn((args, kwargs))
    _tree.learn_registered((args, kwargs))

    def taken(x: Any) -> Any:
        x = _prepared(name, x)
        if is_on_part(x, mesh):
            return _on_mesh(name, x, mesh)
        return x

    return _tree.tree_map(taken, (args, kwargs))


def prepared_for(request: Request, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments in the form that the programs of a function take."""
    return prepared(request.name, args, kwargs, whole_mesh(request))


def whole_mesh(request: Request) -> Any:
    """The mesh of a program of global tensors, else nothing. Code of one rank takes DTensors on
    parts of its mesh as they are.
    """
    if not request.needs_mesh or request.around is not None:
        return None
    return request.mesh or current_mesh()


def _on_mesh(name: str, x: DTensor, mesh: Any) -> DTensor:
    """A DTensor on a part of a mesh as one on the mesh, of which all parts hold the same."""
    where = f"{name}, a DTensor on a part of the mesh"
    refuse_lost_gradient(where, "", x)
    refuse_lost_tangent(where, x)
    made = on_mesh(x, mesh)
    setattr(made, OF_PART, True)
    return made


def _is_other(x: Any) -> bool:
    if isinstance(x, torch.Tensor):
        return _compat.is_arriving(x) or _compat.holds_tensors(_shown(x))
    return _compat.registered(type(x)) is not None


def _prepared(name: str, x: Any) -> Any:
    if not _is_other(x):
        return x
    if _compat.is_arriving(x):
        return x.wait()
    if isinstance(x, SimulatedTensor):
        got = f"the local tensors of all ranks, each a {type(_shown(x)).__name__}"
        fix = "the DTensor itself, or the tensors that it holds"
        raise TreeError.of(name, got, needed="a DTensor", fix=fix)
    return _turned(name, x) if isinstance(x, DTensor) else x


def _shown(x: torch.Tensor) -> torch.Tensor:
    """A tensor, or the local tensor of a DTensor, of the rank that is shown."""
    local: Any = _compat.local_tensor(x) if isinstance(x, DTensor) else x
    return local.shards[local.shown] if isinstance(local, SimulatedTensor) else local


def _turned(name: str, x: DTensor) -> torch.Tensor:
    """A DTensor of tensors that hold others, as one such tensor that holds DTensors."""
    refuse_lost_gradient(f"{name}, a DTensor", "", x)
    refuse_lost_tangent(f"{name}, a DTensor", x)
    local: Any = _compat.local_tensor(x)
    is_simulated = current_world().kind == "simulated"
    shards = getattr(local, "shards", [local] * (x.device_mesh.size() if is_simulated else 1))
    kind = type(_shown(x)).__name__
    rows = [_compat.opened(shard)[0] for shard in shards]
    if any(y.shape != x.shape for row, x in zip(rows, shards, strict=True) for y in row):
        got = f"a DTensor of a {kind}, whose tensors have other shapes than it has"
        raise TreeError.of(
            name, got, fix=f"a {kind} of DTensors: sf.distribute(x, mesh, placements)"
        )
    shells = {_compat.opened(shard)[1].said for shard in shards}
    if len(shells) > 1:
        got = f"a DTensor of {kind}s that differ by rank: {', '.join(sorted(shells))}"
        raise TreeError.of(name, got, fix=f"{kind}s that say the same on all ranks")
    held = [_global(list(column), x) for column in zip(*rows, strict=True)]
    shell = _compat.opened(_shown(x))[1]
    shell = attrs.evolve(shell, shape=tuple(x.shape), stride=x.stride())
    return _compat.closed(shell, held)


def _global(locals_: list[torch.Tensor], like: DTensor) -> DTensor:
    """The DTensor of local tensors, placed like another."""
    x = locals_[0]
    is_simulated = current_world().kind == "simulated"
    local = SimulatedTensor(locals_, shown(like.device_mesh)) if is_simulated else x
    spec = _compat.dtensor_spec(
        like.device_mesh, like.placements, like.shape, like.stride(), x.dtype
    )
    return dtensors([local], [spec])[0]
