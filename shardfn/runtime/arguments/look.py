"""The arguments of one call: checked, and placed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _compat, _tree
from ...capture import constant_key
from ...capture.dtensors.checks import needs_ranks
from ...capture.rewrites.strides import refuse_unstrided
from ...errors import PlacementError, call_site
from ...mesh import axes_of, current_mesh, refuse_elsewhere
from ...types import ShapeDtype
from ...world import current_world
from ..options import Request
from .checks import check_call, check_holders, check_leaves, refuse_classes
from .dynamic import dims_of
from .placed import Placed, aval_of
from .placements import marks_of_arguments

OWN = "_of_one_rank"  # set on a DTensor that stands for each rank's own tensors


def look(request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Placed:
    """Check the arguments of a call, and determine the placements of each.

    Raises:
        TreeError: `in_placements` does not match the arguments, or an argument is neither a
            tensor nor a constant.
        PlacementError: placements that do not fit, all listed.
    """
    static, donated = check_call(request, args, kwargs)
    leaves, treedef = _tree.flatten((args, kwargs))
    paths = _tree.argument_paths(request.signature_of, args, kwargs)
    refuse_unstrided(request.name, leaves, paths)
    world = current_world()
    mesh = _mesh(request, leaves)
    refuse_classes(request, args, kwargs, static)
    check_holders(request, args, kwargs)
    static_leaves = _leaves_of(static, treedef)
    check_leaves(request, leaves, paths, static_leaves)
    tensors = _tensors(leaves)
    marks = marks_of_arguments(request, args, kwargs, tensors, paths, mesh)
    values = [leaves[i] for i in tensors]
    return Placed(
        world=world,
        mesh=mesh,
        axes=axes_of(mesh),
        treedef=treedef,
        paths=tuple(paths),
        tensors=tuple(tensors),
        dtensors=tuple(isinstance(x, DTensor) for x in values),
        avals=tuple(aval_of(x, mesh) for x in values),
        marks=marks,
        unreduced=_unreduced(values),
        followed=_followed(leaves, tensors),
        static=frozenset(static_leaves),
        donated=_donated(_leaves_of(donated, treedef), leaves, tensors),
        constants=_constants(leaves, set(tensors)),
        state=_compat.settings(),
        dynamic=dims_of(request, args, kwargs, paths),
    )


def _donated(donated: set[int], leaves: list[Any], tensors: list[int]) -> tuple[int, ...]:
    """Which of the tensors are donated. Each rank's own are views of the user's tensors, which
    the caller takes away.
    """
    rows = (i for i in sorted(donated & {*tensors}))
    return tuple(i for i in rows if not getattr(leaves[i], OWN, False))


def _tensors(leaves: list[Any]) -> list[int]:
    """Which leaves are tensors, or stand for them."""
    kinds = (torch.Tensor, ShapeDtype)
    return [i for i, x in enumerate(leaves) if isinstance(x, kinds)]


def _followed(leaves: list[Any], tensors: list[int]) -> tuple[int, ...]:
    """Which of the tensors autograd follows."""
    if not torch.is_grad_enabled():
        return ()
    return tuple(i for i in tensors if getattr(leaves[i], "requires_grad", False))


def _unreduced(values: Sequence[Any]) -> tuple[int, ...]:
    """Which of the tensors are unreduced gradients."""
    return tuple(
        i
        for i, x in enumerate(values)
        if isinstance(x, DTensor) and _compat.is_unreduced(_compat.spec_of(x))
    )


def _constants(leaves: list[Any], tensors: set[int]) -> tuple[tuple[int, Any, Any], ...]:
    return tuple((i, constant_key(x), x) for i, x in enumerate(leaves) if i not in tensors)


def _mesh(request: Request, leaves: list[Any]) -> Any:
    mesh = request.mesh or current_mesh() or _of_dtensors(leaves)
    if request.may_be_of_ranks and request.mesh is None and mesh is not None:
        _refuse_parts(leaves, mesh)
    if mesh is None and request.needs_mesh:
        fix = "shard(fn, mesh=...) or call it inside `with use_mesh(mesh)`"
        source = call_site()
        raise PlacementError.of(request.name, "there is no mesh", fix=fix, source=source)
    if mesh is not None:
        refuse_elsewhere(request.name, mesh)
    return mesh


def _refuse_parts(leaves: list[Any], mesh: Any) -> None:
    """Refuse DTensors on parts of the mesh as global tensors: only the code of one rank has such.

    Raises:
        NeedsRanks: always, if there is one.
    """
    others = [x.device_mesh for x in leaves if isinstance(x, DTensor) and x.device_mesh != mesh]
    if any(_compat.root_mesh(other) == mesh for other in others):
        error = needs_ranks("a DTensor on a part of the mesh", mesh)
        error.is_for_good = False
        raise error


def _leaves_of(numbers: Sequence[int], treedef: Any) -> set[int]:
    """The leaves of some positional arguments."""
    counts = [child.num_leaves for child in treedef.children()[0].children()]
    return {i for n in numbers for i in range(sum(counts[:n]), sum(counts[: n + 1]))}


def donated_tensors(
    request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[tuple[str, torch.Tensor]], list[tuple[str, torch.Tensor]]]:
    """Of the code of one rank: the path and the tensor of each donated leaf that is the rank's own,
    and those of all other tensors.
    """
    _, donated = check_call(request, args, kwargs)
    leaves, treedef = _tree.flatten((args, kwargs))
    paths = _tree.argument_paths(request.signature_of, args, kwargs)
    taken = _leaves_of(donated, treedef)
    own: list[tuple[str, torch.Tensor]] = []
    others: list[tuple[str, torch.Tensor]] = []
    for i, row in enumerate(zip(paths, leaves, strict=True)):
        if isinstance(row[1], torch.Tensor):
            is_own = i in taken and not isinstance(row[1], DTensor)
            (own if is_own else others).append(row)
    return own, others


def _of_dtensors(leaves: list[Any]) -> Any:
    """The mesh of the DTensors: of the first, or the mesh of which they are on parts."""
    meshes = [x.device_mesh for x in leaves if isinstance(x, DTensor)]
    first = meshes[0] if meshes else None
    if all(mesh == first for mesh in meshes):
        return first
    root = _compat.root_mesh(first)
    are_parts = all(_compat.root_mesh(mesh) == root for mesh in meshes)
    return root if are_parts else first
