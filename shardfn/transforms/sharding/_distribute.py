"""Between single-device trees and DTensors: distribute, from_local, full."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _compat, _tree, tree_pairs
from ...accepted import described
from ...capture.rewrites.as_strided import refuse_unstrided
from ...errors import PlacementError, TreeError
from ...mesh import all_coordinates, axes_of, check_mesh, refuse_unusable_mesh
from ...partition import layout
from ...partition.emission import wire_dtypes
from ...partition.rules.dtypes import COMPUTED
from ...placement import P, check_pending, check_whole, is_spec, marks_of, torch_placements
from ...runtime.layouts import cut, join
from ...simulated import SimulatedTensor, UnreadTensor, dtensors, shown
from ...types import MeshPlacements
from ...world import current_world


@_compat.outside_only
def distribute(tree: Any, mesh: Any, placements: Any) -> Any:
    """Shard a tree of global tensors over a mesh. Every rank passes the same values, and
    nothing is sent.

    Args:
        tree: a pytree of plain tensors.
        mesh: a DeviceMesh.
        placements: a prefix tree of placements over the tree; None replicates.

    Returns:
        The tree with DTensors for tensors. They are detached, and share no memory with the
        arguments.

    Raises:
        PlacementError, TreeError: placements that do not fit, all at once.

    Source: jax.device_put with a sharding; torch.distributed.tensor.distribute_tensor.

    Example:
        >>> import torch, shardfn as sf
        >>> with sf.fake_world(2):
        ...     sf.distribute(
        ...         torch.zeros(4, 3), sf.make_mesh((2,), ("dp",)), sf.P("dp")
        ...     ).to_local().shape
        torch.Size([2, 3])
    """
    check_mesh("distribute", mesh)
    axes = axes_of(mesh)
    refuse_unusable_mesh("distribute", mesh)
    _tree.learn(tree)
    leaves, treedef = _tree.flatten(tree)
    _refuse_dtensors("distribute", leaves, [path or "the tensor" for path in _tree.paths(tree)])
    refuse_unstrided("distribute", leaves, [path or "the tensor" for path in _tree.paths(tree)])
    try:
        specs = tree_pairs.broadcast_prefix(placements, tree, is_spec)
    except ValueError as error:
        raise TreeError.of(
            "distribute", "placements does not match the tree", *error.args
        ) from None
    out = []
    wrong = []
    for x, spec, path in zip(leaves, specs, _tree.paths(tree), strict=True):
        if not isinstance(x, torch.Tensor):
            if spec not in (None, P()):
                got = f"it is {described(x)}, and {spec} is for a tensor"
                wrong.append(f"{path}: {got}")
            out.append(x)
            continue
        try:
            marks = ("R",) * len(axes.names) if spec is None else marks_of(spec, x.shape, axes)
            check_whole(spec, marks)
            out.append(_placed(x.detach(), mesh, marks))
        except ValueError as error:
            wrong.append(f"{path or 'the tensor'}: {error}")
    if wrong:
        raise PlacementError.of(
            "distribute",
            *wrong,
            fix="placements that fit each tensor",
            mesh=mesh,
            placements=placements,
        )
    return _tree.unflatten(treedef, out)


def _placed(x: torch.Tensor, mesh: Any, marks: MeshPlacements) -> DTensor:
    axes = axes_of(mesh)
    world = current_world()
    x = x if layout.is_dense(x.shape, x.stride()) else x.contiguous()
    spec = _compat.dtensor_spec(mesh, torch_placements(marks), x.shape, x.stride(), x.dtype)
    if world.kind == "fake":
        local = UnreadTensor(cut(x, marks, axes, mesh.get_coordinate()))
    elif world.kind == "simulated":
        local = SimulatedTensor(
            [_own(cut(x, marks, axes, c), x) for c in all_coordinates(axes)], shown(mesh)
        )
    else:
        local = _own(cut(x, marks, axes, mesh.get_coordinate()), x)
    return dtensors([local], [spec])[0]


def _refuse_dtensors(where: str, leaves: Sequence[Any], paths: Sequence[str]) -> None:
    wrong = [path for path, x in zip(paths, leaves, strict=True) if isinstance(x, DTensor)]
    if wrong:
        fix = (
            "sf.full(x), or sf.shard(lambda x: x, mesh, None, placements)(x), which "
            "redistributes it"
        )
        lines = [f"{path} is a DTensor, which has placements already" for path in wrong]
        raise PlacementError.of(where, *lines, needed="plain tensors", fix=fix, arg_path=wrong[0])


def _check_shards(shards: Sequence[Any], paths: Sequence[str]) -> None:
    """Check that shards are tensors of one dtype on one device."""
    kinds = [
        f"a {type(s).__name__}" if not isinstance(s, torch.Tensor) else f"{s.dtype} on {s.device}"
        for s in shards
    ]
    if not shards or len(set(kinds)) > 1 or not isinstance(shards[0], torch.Tensor):
        lines = [f"{path} is {kind}" for path, kind in zip(paths, kinds, strict=True)] or [
            "no tensors"
        ]
        needed = "tensors of one dtype on one device"
        raise PlacementError.of("from_local", *lines, needed=needed, fix="torch.as_tensor(x)")
    _refuse_dtensors("from_local", shards, paths)
    refuse_unstrided("from_local", shards, paths)


def _own(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if it shares memory with one of the others."""
    mine = _compat.storage_of(x)
    return x.clone() if any(mine == _compat.storage_of(other) for other in others) else x


@_compat.outside_only
def from_local(x: Any, mesh: Any, placements: Any) -> DTensor:
    """Make a DTensor of the local tensor of each rank.

    Args:
        x: this rank's local tensor; in a simulated world it may be a list with one tensor for
            each rank of the mesh.
        mesh: a DeviceMesh.
        placements: one leaf: `P`, a Placement, or a list of Placements. With `Partial()` or
            `Partial("avg")`, x is this rank's term of a sum or mean.

    Returns:
        A DTensor with a copy of x. Its global shape assumes equal shards.

    Raises:
        PlacementError: the placement does not fit the tensor or the mesh, or there is not one
            tensor for each rank.

    Source: DTensor.from_local.

    Example:
        >>> import torch, shardfn as sf
        >>> with sf.fake_world(2):
        ...     sf.from_local(torch.zeros(2, 3), sf.make_mesh((2,), ("dp",)), sf.P("dp")).shape
        torch.Size([4, 3])
    """
    check_mesh("from_local", mesh)
    axes = axes_of(mesh)
    world = current_world()
    refuse_unusable_mesh("from_local", mesh)
    is_simulated = world.kind == "simulated"
    shards = _given_shards(x, mesh.size(), is_simulated)
    first = shards[0]
    marks = _checked_marks(first, mesh, placements)
    shape = _whole_shape(shards, marks, axes)
    shards = [s.detach().clone(memory_format=torch.contiguous_format) for s in shards]
    spec = _compat.dtensor_spec(
        mesh,
        torch_placements(marks),
        shape,
        layout.dense_strides(shape, range(len(shape))),
        first.dtype,
    )
    local = SimulatedTensor(shards, shown(mesh)) if is_simulated else shards[0]
    if world.kind == "fake":
        local = UnreadTensor(local)
    (out,) = dtensors([local], [spec])
    return out


def _given_shards(x: Any, count: int, is_simulated: bool) -> list[torch.Tensor]:
    """The local tensors that were given: one, or in a simulated world one for each rank.

    Raises:
        PlacementError: their number is wrong, or they are not plain tensors of one dtype and
            device.
    """
    is_row = isinstance(x, Sequence)
    if is_simulated and isinstance(x, SimulatedTensor) and len(x.shards) == count:
        shards: list[Any] = list(x.shards)  # of a DTensor's to_local
    elif is_row:
        shards = list(x)
    else:
        shards = [x] * count if is_simulated else [x]
    if is_row and (not is_simulated or len(shards) != count):
        raise PlacementError.of(
            "from_local",
            f"{len(shards)} tensors",
            needed="one, or one for each rank of a simulated mesh",
        )
    paths = [f"x[{i}]" if is_row else "x" for i in range(len(shards))]
    _check_shards(shards, paths)
    return shards


def _checked_marks(shard: torch.Tensor, mesh: Any, placements: Any) -> MeshPlacements:
    """The placements of the global tensor that has this shard.

    Raises:
        PlacementError: it does not fit the mesh or the tensor.
    """
    try:
        marks = marks_of(placements, shard.shape, axes_of(mesh))
        check_pending(marks, shard.dtype)
    except ValueError as error:
        raise PlacementError.of(
            "from_local", str(error), mesh=mesh, placements=placements
        ) from None
    return marks


def _whole_shape(shards: list[torch.Tensor], marks: MeshPlacements, axes: Any) -> tuple[int, ...]:
    """The global shape: that of the given shards, or of shards that all have the shape of this
    one.
    """
    everyone = all_coordinates(axes) if len(shards) > 1 else []
    shape = list(shards[0].shape)
    cutting = collections.defaultdict[int, list[int]](list)
    for k, mark in enumerate(marks):
        if found := layout.split(mark):
            cutting[found[0]].append(k)
    for dim, by in cutting.items():
        sizes = [
            s.shape[dim]
            for s, c in zip(shards, everyone, strict=False)
            if not any(c[k] for k in range(len(c)) if k not in by)
        ]
        ranks = math.prod(axes.sizes[k] for k in by)
        shape[dim] = sum(sizes) if sizes else shape[dim] * ranks
    for s, c in zip(shards, everyone, strict=False):
        _check_shape(s, c, layout.local_shape(shape, marks, axes.sizes, c), shape)
    return tuple(shape)


def _check_shape(
    shard: torch.Tensor,
    coordinates: tuple[int, ...],
    local_shape: tuple[int, ...],
    shape: Sequence[int],
) -> None:
    """Check that a rank's shard has the shape that torch.chunk gives it.

    Raises:
        PlacementError: it has another shape.
    """
    if tuple(shard.shape) != local_shape:
        got = f"the shard of rank at {coordinates} has shape {tuple(shard.shape)}"
        needed = f"{local_shape}, torch.chunk's share of {tuple(shape)}"
        raise PlacementError.of("from_local", got, needed=needed)


def full(tree: Any) -> Any:
    """Unshard a tree: replace every DTensor by its global value, a plain tensor.

    Args:
        tree: a pytree. Other leaves than DTensors stay as they are.

    Returns:
        The tree with plain tensors, which share no memory with the arguments. On real ranks
        this is a collective, so all ranks must call it. Gradients go back through it.

    Raises:
        FakeValueError: in a world with numerics=False.

    Source: DTensor.full_tensor.

    Example:
        >>> import torch, shardfn as sf
        >>> with sf.fake_world(2):
        ...     sf.full(sf.distribute(torch.arange(3), sf.make_mesh((2,), ("dp",)), sf.P("dp")))
        tensor([0, 1, 2])
    """
    _tree.learn(tree)
    return _tree.map_held(_whole, tree)


def _whole_otherwise(x: DTensor) -> torch.Tensor:
    """The global tensor of a dtype that Gloo does not carry. A complex tensor is sent as pairs,
    integers in a wider dtype, and what torch only stores as the bytes of each element.
    """
    local = _compat.local_tensor(x).contiguous()
    tail: tuple[int, ...] = ()
    if x.dtype.is_complex:
        carried, tail = torch.view_as_real(local), (2,)
    elif x.dtype in COMPUTED:
        carried = local.to(torch.promote_types(x.dtype, torch.int32))
    else:
        carried, tail = local.unsqueeze(-1).view(torch.uint8), (x.dtype.itemsize,)
    shape = (*x.shape, *tail)
    spec = _compat.dtensor_spec(
        x.device_mesh,
        x.placements,
        shape,
        layout.dense_strides(shape, range(len(shape))),
        carried.dtype,
    )
    (whole,) = dtensors([carried], [spec])
    received = whole.full_tensor().contiguous()
    if x.dtype.is_complex:
        return torch.view_as_complex(received)
    return received.view(x.dtype).squeeze(-1) if tail else received.to(x.dtype)


def _whole(x: Any) -> Any:
    if not isinstance(x, DTensor):
        return x
    local = _compat.local_tensor(x)
    if isinstance(local, UnreadTensor):
        return local.numpy()
    is_simulated = isinstance(local, SimulatedTensor)
    shards = local.shards if is_simulated else [local]
    return _own(_joined(x, shards, is_simulated), *shards)


def _joined(x: DTensor, shards: list[torch.Tensor], is_simulated: bool) -> torch.Tensor:
    """The global tensor of local tensors. Autograd follows torch's own way of making it."""
    if x.requires_grad and torch.is_grad_enabled():
        return x.full_tensor()
    if is_simulated:
        axes = axes_of(x.device_mesh)
        marks = marks_of(list(x.placements), x.shape, axes)
        return join(shards, x.shape, marks, axes)
    return x.full_tensor() if x.dtype in wire_dtypes.CARRIED else _whole_otherwise(x)
