"""Conversion between ordinary tensors and DTensors: `distribute`, `from_local`, `full`."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate

from ... import _compat, _tree, tree_pairs
from ...accepted import accept, described
from ...capture.rewrites.as_strided import refuse_unstrided
from ...errors import PlacementError, TreeError
from ...mesh import all_coordinates, axes_of, check_mesh, refuse_unusable_mesh
from ...own_dtensors import is_own
from ...partition import layout
from ...partition.emission import wire_dtypes
from ...partition.rules.dtypes import COMPUTED
from ...placement import (
    P,
    check_pending,
    check_whole,
    describe,
    is_reduced_by_torch,
    is_spec,
    marks_of,
    stages_in,
    torch_placements,
    zigzag_dims,
)
from ...runtime.layouts import as_chunks, cut, in_order, join, on_all_stages
from ...simulated import SimulatedTensor, UnreadTensor, dtensors, of_one_part, shown
from ...types import REDUCTIONS, MeshAxes, MeshPlacements, stage_of
from ...world import current_world


@_compat.outside_only
def distribute(tree: Any, mesh: Any, placements: Any) -> Any:
    """Shard a tree of global tensors over a mesh. Every rank must pass the same values, because
    `distribute` sends nothing.

    Args:
        tree: a pytree of ordinary tensors, not DTensors.
        mesh: a DeviceMesh.
        placements: a prefix tree of placements over the tree, in which None means replicated.

    Returns:
        The tree with DTensors in place of tensors. The DTensors are detached, and share no memory
        with the tensors of `tree`.

    Raises:
        PlacementError, TreeError: the placements do not fit the tree or the mesh. The error lists
            all placements that do not fit.

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
            "distribute", "the placements do not match the given tree", *error.args
        ) from None
    out = []
    wrong = []
    for x, spec, path in zip(leaves, specs, _tree.paths(tree), strict=True):
        if not isinstance(x, torch.Tensor):
            if spec not in (None, P()):
                got = f"the leaf is {described(x)}, but {spec} is for a tensor"
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
            fix="give placements that fit each tensor",
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
            "sf.full(x), or sf.shard(lambda x: x, mesh, None, placements)(x), which redistributes x"
        )
        lines = [f"{path} is a DTensor, which already has placements" for path in wrong]
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
def from_local(
    x: Any, mesh: Any, placements: Any, *, shape: Sequence[int] | None = None
) -> DTensor:
    """Create a DTensor from the local tensor of each rank.

    Args:
        x: this rank's local tensor. In a simulated world, x may also be a list with one tensor for
            each rank of the mesh. If the placement is an `sf.Stage`, the ranks that do not hold the
            stage pass `torch.empty(0)` of the same dtype.
        mesh: a DeviceMesh.
        placements: a single placement: a `P`, a Placement, or a list of Placements. If the
            placement is `Partial()` or `Partial("avg")`, x is this rank's term of a sum or mean.
        shape: the global shape; by default, the global shape of equal shards, or of the listed
            tensors. If the placement is an `sf.Stage` and x is not a list, `shape` is required,
            because only the ranks of the stage know the shape of x.

    Returns:
        A DTensor with a copy of x.

    Raises:
        PlacementError: the placement does not fit the tensor, the shape or the mesh, or the list
            does not have one tensor for each rank.

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
    accept("from_local", shape=shape)
    is_simulated = world.kind == "simulated"
    shards = _given_shards(x, mesh, is_simulated)
    first = _first_here(shards, mesh, placements, shape)
    if shape is None:
        known = [*first.shape]
        for dim in zigzag_dims(placements):
            if -len(known) <= dim < len(known):
                known[dim] *= mesh.size()  # a multiple of 2n; checked below, of the global shape
        marks = _checked_marks(known, first.dtype, mesh, placements)
        shape = _whole_shape(shards, marks, axes)
    marks = _checked_marks(shape, first.dtype, mesh, placements)
    shape = tuple(shape)
    everyone = all_coordinates(axes) if is_simulated else [mesh.get_coordinate()]
    for shard, coordinates in zip(shards, everyone, strict=True):
        _check_shape(shard, coordinates, marks, axes, shape)
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


def _given_shards(x: Any, mesh: Any, is_simulated: bool) -> list[torch.Tensor]:
    """The local tensors that were given: one, or in a simulated world one for each rank.

    Raises:
        PlacementError: their number is wrong, or they are not plain tensors of one dtype and
            device.
    """
    count = mesh.size()
    is_row = isinstance(x, Sequence)
    if is_simulated and isinstance(x, SimulatedTensor):
        own: Any = of_one_part(x, mesh)
        shards: list[Any] = list(own.shards)  # of a DTensor's to_local
    elif is_row:
        shards = list(x)
    else:
        shards = [x] * count if is_simulated else [x]
    if is_row and (not is_simulated or len(shards) != count):
        raise PlacementError.of(
            "from_local",
            f"{len(shards)} tensors",
            needed="one tensor, or one for each rank of a simulated mesh",
        )
    paths = [f"x[{i}]" if is_row else "x" for i in range(len(shards))]
    _check_shards(shards, paths)
    return shards


def _first_here(
    shards: list[torch.Tensor], mesh: Any, placements: Any, shape: Sequence[int] | None
) -> torch.Tensor:
    """The first of the given shards that is on its stage.

    Raises:
        PlacementError: ranks of other stages cannot know the global shape.
    """
    axes = axes_of(mesh)
    try:
        stages = stages_in(placements, axes)
    except ValueError as error:
        raise _refused(str(error), mesh, placements) from None
    if all(mark == "R" for mark in stages):
        return shards[0]
    if len(shards) == mesh.size():
        rows = zip(shards, all_coordinates(axes), strict=True)
        return next(shard for shard, c in rows if layout.is_here(stages, c))
    if shape is None:
        raise _refused(
            f"{placements} needs a shape, because ranks of other stages do not know the shape",
            mesh,
            placements,
            fix="sf.from_local(x, mesh, placements, shape=(...)) with the global shape",
        )
    return shards[0]


def _refused(text: str, mesh: Any, placements: Any, fix: str | None = None) -> PlacementError:
    return PlacementError.of("from_local", text, fix=fix, mesh=mesh, placements=placements)


def _checked_marks(
    shape: Sequence[int], dtype: torch.dtype, mesh: Any, placements: Any
) -> MeshPlacements:
    """The placements of the global tensor that has a shard of this shape and dtype.

    Raises:
        PlacementError: it does not fit the mesh or the tensor.
    """
    try:
        marks = marks_of(placements, shape, axes_of(mesh))
        check_pending(marks, dtype)
    except ValueError as error:
        raise _refused(str(error), mesh, placements) from None
    return marks


def _whole_shape(shards: list[torch.Tensor], marks: MeshPlacements, axes: Any) -> tuple[int, ...]:
    """The global shape: that of the given shards, or of shards that all have the shape of this
    one.
    """
    everyone = all_coordinates(axes) if len(shards) > 1 else []
    stages = [stage_of(mark) for mark in marks]
    first = [stage.coordinate if stage else 0 for stage in stages]
    here = (s for s, c in zip(shards, everyone, strict=False) if layout.is_here(marks, c))
    shape = list(next(here, shards[0]).shape)
    cutting = collections.defaultdict[int, list[int]](list)
    for k, mark in enumerate(marks):
        if found := layout.split(mark):
            cutting[found[0]].append(k)
    for dim, by in cutting.items():
        sizes = [
            s.shape[dim]
            for s, c in zip(shards, everyone, strict=False)
            if all(c[k] == first[k] for k in range(len(c)) if k not in by)
        ]
        ranks = math.prod(axes.sizes[k] for k in by)
        shape[dim] = sum(sizes) if sizes else shape[dim] * ranks
    return tuple(shape)


def _check_shape(
    shard: torch.Tensor,
    coordinates: Sequence[int],
    marks: MeshPlacements,
    axes: MeshAxes,
    shape: Sequence[int],
) -> None:
    """Check that a rank's shard has the shape that torch.chunk gives it.

    Raises:
        PlacementError: it has another shape.
    """
    local_shape = layout.local_shape(shape, marks, axes.sizes, coordinates)
    if tuple(shard.shape) == local_shape:
        return
    got = f"the shard of the rank at {tuple(coordinates)} has shape {tuple(shard.shape)}"
    needed, fix = f"{local_shape}, torch.chunk's share of {tuple(shape)}", None
    if not layout.is_here(marks, coordinates):
        needed = (
            f"shape {local_shape}, since with {describe(marks, axes)} another stage holds the value"
        )
        fix = "torch.empty(0, dtype=x.dtype) on ranks of other stages"
    raise PlacementError.of("from_local", got, needed=needed, fix=fix)


def full(tree: Any) -> Any:
    """Unshard a tree: replace every DTensor by an ordinary tensor with its global value.

    Args:
        tree: a pytree. Leaves that are not DTensors do not change.

    Returns:
        The tree with ordinary tensors, which share no memory with the DTensors. On real ranks,
        `full` is a collective, so all ranks must call it. `full` is differentiable.

    Raises:
        FakeValueError: the simulated world computes no values (`numerics=False`).

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
    if any(map(is_reduced_by_torch, x.placements)):
        known = [Replicate() if is_reduced_by_torch(p) else p for p in x.placements]
        x = x.redistribute(placements=known)
    local = _compat.local_tensor(x)
    if isinstance(local, UnreadTensor):
        return local.numpy()
    is_simulated = isinstance(local, SimulatedTensor)
    shards = local.shards if is_simulated else [local]
    return _own(_joined(x, shards, is_simulated), *shards)


def _joined(x: DTensor, shards: list[torch.Tensor], is_simulated: bool) -> torch.Tensor:
    """The global tensor of local tensors. Autograd follows torch's own way of making it."""
    axes = axes_of(x.device_mesh)
    marks = marks_of(list(x.placements), x.shape, axes)
    if x.requires_grad and torch.is_grad_enabled():
        return _OfOwn.apply(x, marks) if is_own(x) else x.full_tensor()
    if is_simulated:
        return join(shards, x.shape, marks, axes)
    if any(map(stage_of, marks)):
        x = on_all_stages(x)
    zigzags = [mark for mark in marks if layout.is_zigzag(mark)]
    whole = _received(as_chunks(x) if zigzags else x)
    for mark in zigzags:
        dim, _ = layout.dim_and_unit(mark)
        whole = in_order(whole, dim, marks, axes)
    return whole


def _received(x: DTensor) -> torch.Tensor:
    """The global tensor of a DTensor at placements of torch, on real ranks."""
    return x.full_tensor() if x.dtype in wire_dtypes.CARRIED else _whole_otherwise(x)


class _OfOwn(torch.autograd.Function):
    """The global value of a DTensor at a placement of our own. The gradient is placed alike."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, marks: MeshPlacements) -> torch.Tensor:
        ctx.mesh = x.device_mesh
        ctx.marks = tuple("R" if mark in REDUCTIONS else mark for mark in marks)
        return _whole(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        return _placed(cotangent, ctx.mesh, ctx.marks), None
