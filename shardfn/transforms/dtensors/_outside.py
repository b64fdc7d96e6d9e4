"""The conversion of the arguments and results of per-rank code to DTensors and back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch.distributed.tensor import DTensor, Shard

from ... import _compat, _tree
from ...capture import Arguments
from ...capture.dtensors.dtensor_values import dtensor_placements_text
from ...errors import TreeError
from ...mesh import axes_of
from ...ops.text_formats import is_part, print_placed_list
from ...runtime import Needs, Request, donation
from ...runtime.arguments import (
    ATTRIBUTE,
    OWN,
    Dims,
    as_given,
    dims_of,
    donated_tensors,
    marked,
    refuse_lost_gradient,
    refuse_lost_tangent,
)
from ...simulated import SimulatedTensor, UnreadTensor, dtensors, is_on_part, of_one_part, shown
from ...types import ShapeDtype
from ...world import current_world
from ._submesh_dtensors import of_part, own_of

OF_RANKS = SimulatedTensor, UnreadTensor


def placed(leaves: list[Any]) -> tuple[str, ...]:
    """For each leaf of the arguments the placements of a DTensor, as text; those of each DTensor
    that a tensor holds; empty for others.
    """
    return tuple(map(_text, leaves))


def linked_as(mesh: Any, leaves: list[Any]) -> Any:
    """The mesh of a call's DTensors, where it equals another one but for its links."""
    own = next((x.device_mesh for x in leaves if isinstance(x, DTensor)), mesh)
    is_other = own is not mesh and own == mesh and axes_of(own) != axes_of(mesh)
    return own if is_other else mesh


def _text(x: Any) -> str:
    if isinstance(x, DTensor):
        return dtensor_placements_text(x)
    return print_placed_list([dtensor_placements_text(y) for y in _held_dtensors(x)])


def _held_dtensors(x: Any) -> list[DTensor]:
    """The DTensors that a tensor holds."""
    is_holder = isinstance(x, torch.Tensor) and _compat.holds_tensors(x)
    held = _compat.opened(x)[0] if is_holder else []
    return [y for y in held if isinstance(y, DTensor)]


def entering(request: Request, mesh: Any, args: Any, kwargs: Any) -> Any:
    """The arguments, with DTensors of all ranks' tensors in place of plain tensors.

    Raises:
        ShardError: a plain tensor requires grad.
    """
    every = _tree.quick_leaves((args, kwargs))
    record = functools.cache(lambda: as_given(request, args, kwargs))
    paths = functools.cache(lambda: _paths(record()))
    is_dynamic = request.dynamic is not None or any(map(marked, every))
    dims = _dims(request, record()) if is_dynamic else {}
    leaves = []
    for x in every:
        if is_on_part(x, mesh):
            path = paths().get(id(x), "")
            refuse_lost_gradient(f"{request.name}, argument {path}", path, x)
            x = _global(own_of(request.name, path, x), mesh)
            setattr(x, OWN, True)
        elif isinstance(x, torch.Tensor) and not isinstance(x, DTensor):
            if not _holds_dtensors(request.name, paths, x):
                _refuse_lost(request, paths, x)
                x = _with_marks(_Entering.apply(x, mesh), dims.get(id(x)))
                setattr(x, OWN, True)
        elif isinstance(x, ShapeDtype):
            x = _global(_unread(x, mesh.device_type), mesh)
        leaves.append(x)
    return _tree.refill((args, kwargs), leaves)


def _paths(arguments: Arguments) -> dict[int, str]:
    """The paths of the leaves, by id."""
    return dict(zip(map(id, arguments.leaves), arguments.paths, strict=True))


def _refuse_lost(request: Request, paths: Callable[[], dict[int, str]], x: torch.Tensor) -> None:
    """Refuse a tensor whose gradient or tangent would be lost. Reads the paths only then."""
    is_followed = x.requires_grad and torch.is_grad_enabled() and request.differentiated is None
    if not is_followed and not _compat.in_dual_level():
        return
    path = paths().get(id(x), "")
    where = f"{request.name}, argument {path}"
    if is_followed:
        refuse_lost_gradient(where, path, x)
    refuse_lost_tangent(where, x)


def _dims(request: Request, arguments: Arguments) -> dict[int, Dims]:
    """The dims of tensors, by id, whose sizes may change between calls: of all, if of one."""
    found = dims_of(request, arguments)
    return {id(x): found.get(i, {}) for i, x in enumerate(arguments.leaves)}


def _with_marks(x: torch.Tensor, dims: Dims | None) -> torch.Tensor:
    """The global tensor of a rank's own, whose dims come after the first, with its marks."""
    if dims is not None:
        shifted = {dim + 1: is_strict for dim, is_strict in dims.items()}
        setattr(x, ATTRIBUTE, shifted)
    return x


def _holds_dtensors(name: str, paths: Callable[[], dict[int, str]], x: torch.Tensor) -> bool:
    """Whether a tensor holds DTensors, and so is global in the code of one rank.

    Raises:
        TreeError: it holds other tensors too, or tensors that hold DTensors.
    """
    held = _compat.opened(x)[0] if _compat.holds_tensors(x) else []
    kinds = [_holds_any(y) for y in held]
    if not any(kinds):
        return False
    if all(isinstance(y, DTensor) for y in held):
        return True
    got = f"the argument is a {type(x).__name__} of DTensors and other tensors, in code of one rank"
    fix = "pass the DTensors of this argument as separate arguments, or replace its other tensors "
    fix += "by DTensors"
    known = paths()
    path = next((known[id(y)] for y in (x, *held) if id(y) in known), "")
    where = f"{name}, argument {path}"
    raise TreeError.of(where, got, needed="only DTensors", fix=fix, arg_path=path)


def _holds_any(x: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor, or holds one."""
    if isinstance(x, DTensor):
        return True
    held = _compat.opened(x)[0] if _compat.holds_tensors(x) else []
    return any(map(_holds_any, held))


def leaving(out: Any) -> Any:
    """The results, with this rank's tensors in place of DTensors of all ranks'."""
    result, kinds = out
    rows = zip(_tree.quick_leaves((result,)), kinds, strict=True)
    (found,) = _tree.refill((result,), [_own(x, text) for x, text in rows])
    return found


def _own(x: Any, text: str) -> Any:
    if is_part(text):
        return of_part(_compat.local_tensor(x).squeeze(0), text, x.device_mesh)
    if text or not isinstance(x, torch.Tensor):
        return x
    if _compat.holds_tensors(x):
        tensors, shell = _compat.opened(x)
        shell = attrs.evolve(shell, shape=shell.shape[1:], stride=shell.stride[1:])
        return _compat.closed(shell, [_own(y, text) for y in tensors])
    return _Leaving.apply(x) if isinstance(x, DTensor) else x


class _Entering(torch.autograd.Function):
    """A rank's own tensor as a row of a global one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: Any) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return _global(x, mesh)

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        if cotangent is None:  # no result depends on x
            return None, None
        return _compat.local_tensor(cotangent).squeeze(0), None


class _Leaving(torch.autograd.Function):
    """A rank's own tensor of a global one. A loss is a copy, which may be changed in place: torch
    refuses that for a view.
    """

    @staticmethod
    def forward(ctx: Any, x: Any) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.mesh = x.device_mesh
        own = _compat.local_tensor(x).squeeze(0)
        return own.clone() if own.numel() == 1 else own

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        return None if cotangent is None else _global(cotangent, ctx.mesh)


def calling(run: Any, request: Request, args: Any, kwargs: Any) -> Any:
    """Run a call of code of one rank, whose donated tensors are gone afterwards.

    Raises:
        ShardError: one that cannot be donated.
    """
    own, others = donated_tensors(as_given(request, args, kwargs))
    donation.check_own(request.name, own, others)
    out = run()
    if not isinstance(out, Needs):
        donation.take_own(request.name, own)
    return out


def _unread(x: ShapeDtype, device: str) -> UnreadTensor:
    """A tensor without values in place of a shape."""
    like = torch.empty(x.shape, dtype=x.dtype, device="meta")
    return UnreadTensor(like, torch.device(device))


def _global(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    """A global tensor with one element of dim 0 for each rank: its own x."""
    count = mesh.size()
    world = current_world()
    if _compat.holds_tensors(x):
        tensors, shell = _compat.opened(x)
        shape = (count, *shell.shape)
        stride = (max(x.numel(), 1), *shell.stride)
        shell = attrs.evolve(shell, shape=shape, stride=stride)
        return _compat.closed(shell, [_global(y, mesh) for y in tensors])
    row = x.detach().unsqueeze(0)
    if world.kind == "fake":
        row = row if isinstance(row, UnreadTensor) else UnreadTensor(row)
    elif world.kind == "simulated" and type(row) not in OF_RANKS:
        row = SimulatedTensor([row] * count, shown(mesh))
    row = of_one_part(row, mesh)
    shape = (count, *x.shape)
    stride = (max(x.numel(), 1), *x.stride())
    placements = (Shard(0),) * len(axes_of(mesh).names)
    spec = _compat.dtensor_spec(mesh, placements, shape, stride, x.dtype)
    return dtensors([row], [spec])[0]
