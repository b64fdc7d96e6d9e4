"""The arguments of one call, flattened once, checked and placed.

`taken` flattens the arguments, `arguments_of` adds names and paths, and `place` checks the
arguments and determines their placements. Later stages use the resulting record, and no trees.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import attrs
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from .. import _compat, _tree, argnums, tree_pairs
from .._compat.cuda import numbered, unnumbered
from ..axis_options import OPTIONS, with_options
from ..capture import Arguments, constant_key
from ..capture.closure.closed_over_tensors import lost_tangent
from ..capture.dtensors.flattened_meshes import home_of
from ..capture.dtensors.placement_checks import needs_ranks
from ..capture.refusals.leaked_values import LeakedTensor, leaked
from ..capture.rewrites import sparse_borders
from ..capture.rewrites.as_strided import refuse_unstrided
from ..errors import PlacementError, ShardError, TreeError, call_site
from ..mesh import (
    all_coordinates,
    axes_of,
    current_mesh,
    mesh_of_world,
    refuse_other,
    refuse_unusable_mesh,
)
from ..partition import layout
from ..placement import AUTO, check_pending, check_whole, describe, is_spec, marks_of
from ..simulated import (
    DonatedTensor,
    SimulatedTensor,
    UnreadTensor,
    dtensors,
    is_on_part,
    on_mesh,
    placements_on,
    shown,
    used_after_donation,
)
from ..types import CONSTANTS, Aval, MeshAxes, MeshPlacements, ShapeDtype
from ..world import World, current_world, default_device_type
from .options import Request


@attrs.frozen(eq=False, repr=False)
class Placed:
    """The checked arguments of one call: the static ones, and the placements of each tensor."""

    world: World
    mesh: Any
    axes: MeshAxes
    treedef: Any
    paths: tuple[str, ...]  # of all leaves
    tensors: tuple[int, ...]  # which leaves are tensors
    dtensors: tuple[bool, ...]  # of the tensors
    avals: tuple[Aval, ...]  # of the tensors
    marks: tuple[MeshPlacements, ...]  # of the tensors
    unreduced: tuple[int, ...]  # which of the tensors are unreduced gradients
    donated: tuple[int, ...]  # which leaves are tensors of donated arguments
    followed: tuple[int, ...]  # which leaves are tensors that autograd follows
    static: frozenset[int]  # which leaves are of static arguments
    constants: tuple[tuple[int, Any, Any], ...]  # for the other leaves: position, key, value
    state: tuple[Any, ...]  # torch's settings at the call
    # by leaf, the dims that may change between calls: `dynamic.dims_of`
    dynamic: dict[int, dict[int, bool]]

    @property
    def is_simulated(self) -> bool:
        """Whether the simulator runs the programs of all ranks in this process."""
        return self.world.kind == "simulated" and self.mesh is not None

    @property
    def device(self) -> str:
        """The device type of the mesh, or the device of the arguments."""
        if self.mesh is not None:
            return self.mesh.device_type
        return next((x.device for x in self.avals if x.device != "cpu"), "cpu")

    @property
    def coordinate(self) -> tuple[int, ...]:
        """This rank's coordinate in the mesh; in a simulated world that of the displayed rank."""
        if self.is_simulated:
            return all_coordinates(self.axes)[shown(self.mesh, self.world.rank)]
        return tuple(self.mesh.get_coordinate()) if self.mesh is not None else ()


def donated_places(placed: Placed) -> list[int]:
    """List the placeholders of a program that are donated arguments."""
    skip = len(placed.axes.names)
    return [skip + k for k, leaf in enumerate(placed.tensors) if leaf in placed.donated]


def aval_of(x: Any, mesh: Any) -> Aval:
    """Build the abstract value of a tensor for capture: shape, strides, dtype, device."""
    shape = tuple(x.shape)
    if isinstance(x, ShapeDtype):
        return Aval(
            shape,
            layout.dense_strides(shape, range(len(shape))),
            x.dtype,
            device_of(torch.device("meta"), mesh),
        )
    device = device_of(x.device, mesh)
    return Aval(shape, x.stride(), x.dtype, device)


def device_of(device: torch.device, mesh: Any) -> str:
    """Return the device of an argument; an argument without values has that of the mesh, or torch's
    default.
    """
    if device.type != "meta":
        return str(device)
    if mesh is not None:
        return mesh.device_type
    default = default_device_type()
    return "cpu" if default == "meta" else default


OWN = "_of_one_rank"  # set on a DTensor that stands for each rank's own tensors


class Taken(NamedTuple):
    """The arguments of a call in the form that programs take, with their flat leaves."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    treedef: _tree.TreeDef


def taken(request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Taken:
    """Convert arguments to the form that programs take: asynchronous tensors waited for, and a
    DTensor of wrapper subclasses turned inside out.

    Raises:
        TreeError: a DTensor of tensors that hold others of another shape.
        ShardError: autograd records a DTensor on a submesh.
    """
    leaves, treedef = _tree.flatten((args, kwargs))
    if is_prepared(leaves, whole_mesh(request)):
        return Taken(args, kwargs, leaves, treedef)
    args, kwargs = prepared_for(request, args, kwargs)
    return Taken(args, kwargs, *_tree.flatten((args, kwargs)))


def as_given(request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Make the `Arguments` record of a call as the user wrote it, before `taken` converts it.

    Raises:
        TreeError: as `arguments_of`.
    """
    return arguments_of(request, Taken(args, kwargs, *_tree.flatten((args, kwargs))))


def arguments_of(request: Request, call: Taken) -> Arguments:
    """Make the `Arguments` record of a call: bind the signature once, and read the paths once.

    Raises:
        TreeError: they do not fit the signature, or the options that name them by position.
    """
    args, kwargs, leaves, treedef = call
    signature = argnums.signature_of(request.signature_of)
    try:
        bound = signature.bind(*args, **kwargs) if signature is not None else None
    except TypeError as error:
        source, fix = call_site(), f"the arguments of {signature}"
        raise TreeError.of(request.name, str(error), fix=fix, source=source) from None
    names = _tree.positional_names(bound, len(args))
    paths = tuple(_tree.call_paths(treedef, names))
    given = args, kwargs, signature
    static = argnums.of_call(request.name, "static_argnums", request.static_argnums, *given)
    donated = argnums.of_call(request.name, "donate_argnums", request.donate_argnums, *given)
    rows = tuple(static), tuple(donated)
    made = Arguments(args, kwargs, leaves, treedef, paths, signature, tuple(names), *rows)
    holding = {
        n for n in static if any(isinstance(leaves[i], torch.Tensor) for i in made.places([n]))
    }
    argnums.refuse_static(request.name, static, donated, args, holding)
    sparse_borders.refuse_donated(request.name, treedef.child(0), donated)
    return made


def place(request: Request, arguments: Arguments) -> Placed:
    """Check the arguments of a call, and determine the placements of each.

    Raises:
        TreeError: `in_placements` does not match the arguments, or an argument is neither a
            tensor nor a constant.
        PlacementError: placements that do not fit, all listed.
    """
    leaves, treedef, paths = arguments.leaves, arguments.treedef, arguments.paths
    options = {name: getattr(request, name) for name in OPTIONS}
    refuse_unstrided(request.name, leaves, paths)
    world = current_world()
    mesh = _mesh(request, leaves)
    _check_containers(request, arguments)
    static = arguments.places(arguments.static)
    check_leaves(request, leaves, paths, static)
    tensors = _tensors(leaves)
    marks = marks_of_arguments(request, arguments, tensors, mesh)
    values = [leaves[i] for i in tensors]
    return Placed(
        world=world,
        mesh=mesh,
        axes=with_options(request.name, axes_of(mesh), options),
        treedef=treedef,
        paths=tuple(paths),
        tensors=tuple(tensors),
        dtensors=tuple(isinstance(x, DTensor) for x in values),
        avals=tuple(aval_of(x, mesh) for x in values),
        marks=marks,
        unreduced=_unreduced(values),
        followed=_followed(leaves, tensors),
        static=frozenset(static),
        donated=_donated(arguments.places(arguments.donated), leaves, tensors),
        constants=_constants(leaves, set(tensors)),
        state=_compat.settings(),
        dynamic=dims_of(request, arguments),
    )


def _donated(donated: set[int], leaves: list[Any], tensors: list[int]) -> tuple[int, ...]:
    """List the tensors of a call that are donated. Those of per-rank code are views of the user's
    tensors, which the caller invalidates.
    """
    rows = (i for i in sorted(donated & {*tensors}))
    return tuple(i for i in rows if not getattr(leaves[i], OWN, False))


def _tensors(leaves: list[Any]) -> list[int]:
    """List the positions of leaves that are tensors, or stand for tensors."""
    kinds = (torch.Tensor, ShapeDtype)
    return [i for i, x in enumerate(leaves) if isinstance(x, kinds)]


def _followed(leaves: list[Any], tensors: list[int]) -> tuple[int, ...]:
    """List the tensors that autograd follows."""
    if not torch.is_grad_enabled():
        return ()
    return tuple(i for i in tensors if getattr(leaves[i], "requires_grad", False))


def _unreduced(values: Sequence[Any]) -> tuple[int, ...]:
    """List the tensors that are unreduced (Partial) gradients."""
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
        fix = "shard(fn, mesh=...), or call the function inside `with use_mesh(mesh)`"
        source = call_site()
        raise PlacementError.of(
            request.name, "no mesh is given, and no current mesh is set", fix=fix, source=source
        )
    if mesh is not None:
        refuse_unusable_mesh(request.name, mesh)
    return mesh


def _refuse_parts(leaves: list[Any], mesh: Any) -> None:
    """Refuse DTensors on submeshes as global tensors: only per-rank code takes them.

    Raises:
        NeedsRanks: always, if there is one.
    """
    others = [x.device_mesh for x in leaves if isinstance(x, DTensor) and x.device_mesh != mesh]
    if any(_compat.root_mesh(other) == mesh for other in others):
        error = needs_ranks("a DTensor on a submesh", mesh)
        error.is_for_good = False
        raise error


def donated_tensors(
    arguments: Arguments,
) -> tuple[list[tuple[str, torch.Tensor]], list[tuple[str, torch.Tensor]]]:
    """Split the tensors of a per-rank call into the donated local ones, with their paths, and all
    others.
    """
    donated = arguments.places(arguments.donated)
    own: list[tuple[str, torch.Tensor]] = []
    others: list[tuple[str, torch.Tensor]] = []
    for i, row in enumerate(zip(arguments.paths, arguments.leaves, strict=True)):
        if isinstance(row[1], torch.Tensor):
            is_own = i in donated and not isinstance(row[1], DTensor)
            (own if is_own else others).append(row)
    return own, others


def _of_dtensors(leaves: list[Any]) -> Any:
    """Return the mesh of the DTensors among the leaves, or the root mesh of their submeshes."""
    meshes = [x.device_mesh for x in leaves if isinstance(x, DTensor)]
    first = meshes[0] if meshes else None
    if all(mesh == first for mesh in meshes):
        return first
    root = _compat.root_mesh(first)
    are_parts = all(_compat.root_mesh(mesh) == root for mesh in meshes)
    return root if are_parts else first


OF_PART = "_of_part"  # set on a DTensor of the mesh that was one on a part of it


def is_prepared(leaves: list[Any], mesh: Any = None) -> bool:
    """Return whether a program takes all these arguments as they are, without `prepared_for`.

    Args:
        leaves: of the arguments.
        mesh: of a program of global tensors, which takes no DTensors on parts of it.
    """
    if any(map(_is_other, leaves)):
        return False
    return not any(is_on_part(x, mesh) for x in leaves)


def prepared_for(request: Request, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Convert the arguments that are not yet in the form that programs take."""
    name, mesh = request.name, whole_mesh(request)
    _tree.learn((args, kwargs))
    _tree.learn_registered((args, kwargs))

    sparse_borders.refuse_followed(name, request.signature_of, args, kwargs)

    def prepared(x: Any) -> Any:
        x = _prepared(name, x)
        # DTensors on a part of the mesh of a program of global tensors
        return _on_mesh(name, x, mesh) if is_on_part(x, mesh) else x

    return _tree.tree_map(prepared, (args, kwargs))


def whole_mesh(request: Request) -> Any:
    """Return the mesh of a program of global tensors. None for per-rank code, which takes DTensors
    on submeshes as they are.
    """
    if not request.needs_mesh or request.around is not None:
        return None
    return request.mesh or current_mesh()


def _on_mesh(name: str, x: DTensor, mesh: Any) -> DTensor:
    """Turn a DTensor on a submesh into one on the root mesh, replicated over the other axes."""
    where = f"{name}, a DTensor on a submesh"
    refuse_lost_gradient(where, "", x)
    refuse_lost_tangent(where, x)
    made = on_mesh(x, mesh)
    setattr(made, OF_PART, True)
    return made


def _is_other(x: Any) -> bool:
    if isinstance(x, torch.Tensor):
        is_sparse = x.layout is not torch.strided and sparse_borders.is_supported(x)
        return is_sparse or _compat.is_arriving(x) or _compat.holds_tensors(_shown(x))
    return _compat.registered(type(x)) is not None


def _prepared(name: str, x: Any) -> Any:
    if not _is_other(x):
        return x
    if sparse_borders.is_supported(x):
        made = sparse_borders.split(x)
        _tree.learn_registered((made,))
        return made
    if _compat.is_arriving(x):
        return x.wait()
    if isinstance(x, SimulatedTensor):
        got = f"the argument holds local tensors of all ranks, each a {type(_shown(x)).__name__}"
        fix = "pass the DTensor itself, or the inner tensors of its local tensors"
        raise TreeError.of(name, got, needed="a DTensor", fix=fix)
    return _turned(name, x) if isinstance(x, DTensor) else x


def _shown(x: torch.Tensor) -> torch.Tensor:
    """Return the local tensor, of the displayed rank, of a DTensor or plain tensor."""
    local: Any = _compat.local_tensor(x) if isinstance(x, DTensor) else x
    return local.shards[local.shown] if isinstance(local, SimulatedTensor) else local


def _turned(name: str, x: DTensor) -> torch.Tensor:
    """Turn a DTensor of wrapper subclasses into a wrapper subclass of DTensors."""
    refuse_lost_gradient(f"{name}, a DTensor", "", x)
    refuse_lost_tangent(f"{name}, a DTensor", x)
    local: Any = _compat.local_tensor(x)
    is_simulated = current_world().kind == "simulated"
    shards = getattr(local, "shards", [local] * (x.device_mesh.size() if is_simulated else 1))
    kind = type(_shown(x)).__name__
    rows = [_compat.opened(shard)[0] for shard in shards]
    if any(y.shape != x.shape for row, x in zip(rows, shards, strict=True) for y in row):
        got = f"the inner tensors of the DTensor's {kind} have other shapes than the {kind}"
        raise TreeError.of(
            name, got, fix=f"pass a {kind} of DTensors: sf.distribute(x, mesh, placements)"
        )
    shells = {_compat.opened(shard)[1].said for shard in shards}
    if len(shells) > 1:
        got = f"the {kind} in the DTensor differs between ranks: {', '.join(sorted(shells))}"
        raise TreeError.of(name, got, fix=f"use the same {kind} metadata on all ranks")
    held = [_global(list(column), x) for column in zip(*rows, strict=True)]
    shell = _compat.opened(_shown(x))[1]
    shell = attrs.evolve(shell, shape=tuple(x.shape), stride=x.stride())
    return _compat.closed(shell, held)


def _global(locals_: list[torch.Tensor], like: DTensor) -> DTensor:
    """Make a DTensor of local tensors with the placements of another DTensor."""
    x = locals_[0]
    is_simulated = current_world().kind == "simulated"
    local = SimulatedTensor(locals_, shown(like.device_mesh)) if is_simulated else x
    spec = _compat.dtensor_spec(
        like.device_mesh, like.placements, like.shape, like.stride(), x.dtype
    )
    return dtensors([local], [spec])[0]


SHOWN = 4  # paths in an error
WITH_VALUES = (
    "make the values by sf.init(module_fn, mesh, placements, key) or "
    "module.to_empty(device=...); .trace and .lower need no values"
)


def _check_containers(request: Request, arguments: Arguments) -> None:
    """Refuse arguments in containers that cannot be rebuilt.

    Raises:
        TreeError: containers of user classes that are registered as pytrees but unknown to Dynamo.
        ShardError: a tensor that holds others has a gradient that would be lost.
    """
    sides = zip(arguments.treedef.children(), _named_arguments(arguments), strict=True)
    rows = [
        (*row, child)
        for side, given in sides
        for row, child in zip(given, side.children(), strict=True)
    ]
    kinds = [_tree.container_classes(child) for *_, child in rows]
    static = {*arguments.static}
    wrong = [
        found
        for i, ((path, x, _), classes) in enumerate(zip(rows, kinds, strict=True))
        if i not in static and any(map(_is_unknown, classes))
        for found in tree_pairs.classes(x, path)
    ]
    if wrong:
        source, fix = (
            call_site(),
            "pass a dict, list, tuple or NamedTuple of the object's tensors",
        )
        lines = [f"{path} is a {kind}" for path, kind in wrong]
        needed = "dict, OrderedDict, defaultdict, list, tuple, NamedTuple or deque"
        raise TreeError.of(
            request.name, *lines, needed=needed, fix=fix, source=source, arg_path=wrong[0][0]
        )
    for (root, arg, _), classes in zip(rows, kinds, strict=True):
        holds_tensors = any(issubclass(kind, torch.Tensor) for kind in classes)
        for way, x in _tree.holders(arg) if holds_tensors else ():
            path = root + way
            where = f"{request.name}, argument {path}"
            refuse_lost_gradient(where, path, x)
            refuse_lost_tangent(where, x)


def _named_arguments(arguments: Arguments) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """Pair the positional and keyword arguments of a call with their names."""
    return list(zip(arguments.names, arguments.args, strict=True)), [*arguments.kwargs.items()]


def _is_unknown(kind: type) -> bool:
    """Return whether no registered rule tells how to rebuild a container class."""
    is_known = _tree.is_plain_class(kind) or issubclass(kind, torch.Tensor)
    return not is_known and _compat.registered(kind) is None


def check_leaves(
    request: Request, leaves: list[Any], paths: Sequence[str], static: set[int]
) -> None:
    for i, (x, path) in enumerate(zip(leaves, paths, strict=True)):
        where = f"{request.name}, argument {path}"
        if isinstance(x, DonatedTensor) or (
            isinstance(x, DTensor) and isinstance(_compat.local_tensor(x), DonatedTensor)
        ):
            raise used_after_donation(getattr(x, "call", None) or _compat.local_tensor(x).call)
        if isinstance(x, torch.Tensor):
            if isinstance(x, LeakedTensor) or _compat.is_fake(x):
                raise leaked(where)
            _refuse_foreign(where, path, x)
            if isinstance(x, (SimulatedTensor, UnreadTensor)):
                raise _of_each_rank(request, where, path, x, leaves)
            if request.differentiated is None:
                refuse_lost_gradient(where, path, x)
            refuse_lost_tangent(where, x)
        elif (
            not isinstance(x, (*CONSTANTS, ShapeDtype, DeviceMesh))
            and not _is_function(x)
            and i not in static
        ) or _is_numpys(x):
            fix, source = _instead(x, path), call_site()
            module = "numpy." if type(x).__module__ == "numpy" else ""
            got, needed = f"a {module}{type(x).__name__}", "a tensor or a constant"
            raise TreeError.of(where, got, needed=needed, fix=fix, source=source, arg_path=path)


def refuse_lost_gradient(where: str, path: str, x: torch.Tensor) -> None:
    """Refuse an argument that requires grad where its gradient would be lost.

    Raises:
        ShardError: saying how to differentiate.
    """
    if x.requires_grad and torch.is_grad_enabled():
        fix = (
            "differentiate inside the function with sf.grad and pass x.detach(); or call the "
            "function under torch.no_grad()"
        )
        got, source = (
            "the argument requires grad, but autograd cannot differentiate this call",
            call_site(),
        )
        raise ShardError.of(where, got, fix=fix, source=source, arg_path=path)


def refuse_lost_tangent(where: str, x: torch.Tensor) -> None:
    """Refuse an argument with a forward-mode tangent where the tangent would be lost.

    Raises:
        ShardError: saying how to take tangents.
    """
    if _compat.in_dual_level() and _compat.has_tangent(x):
        raise lost_tangent(where)


def refuse_without_values(
    name: str, values: Sequence[Any], paths_of: Callable[[], Sequence[str]]
) -> None:
    """Refuse to run on meta tensors and ShapeDtypes, which only `trace` and `lower` take.

    Args:
        name: of the function.
        values: arguments, or what the function closes over.
        paths_of: returns the path of each.

    Raises:
        TreeError: names each.
    """
    shapes = [i for i, x in enumerate(values) if isinstance(x, ShapeDtype)]
    lacking = shapes or [i for i, x in enumerate(values) if _is_on_meta(x)]
    if not lacking:
        return
    paths = paths_of()
    wrong = [paths[i] for i in lacking]
    more = [f"{len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
    names = ", ".join([*wrong[:SHOWN], *more])
    raise TreeError.of(
        name,
        f"{'ShapeDtypes' if shapes else 'tensors on the meta device'} have no values: {names}",
        needed="tensors with values, because the call runs the function",
        fix=WITH_VALUES,
        source=call_site(),
        arg_path=wrong[0],
    )


def _is_on_meta(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_meta


def _is_numpys(x: Any) -> bool:
    """Return whether x is numpy's str or bytes, which Dynamo would take for an array."""
    return isinstance(x, (str, bytes)) and type(x).__module__ == "numpy"


def _of_each_rank(
    request: Request, where: str, path: str, x: torch.Tensor, leaves: list[Any]
) -> ShardError:
    """Build the error for a SimulatedTensor (one local tensor per rank), which only per-rank code
    takes.
    """
    meshes = [request.mesh, *(y.device_mesh for y in leaves if isinstance(y, DTensor))]
    mesh = next((m for m in (*meshes, current_mesh()) if m is not None), None)
    mesh = mesh_of_world(x.device.type) if mesh is None else mesh
    count = len(x.shards) if isinstance(x, SimulatedTensor) else mesh.size()
    if request.may_be_of_ranks and count == home_of(mesh).size():
        error = needs_ranks(where, mesh)
        error.is_for_good = False
        return error
    fix = "pass the DTensor sf.from_local(x, mesh, placements); or use sf.jit for code of one rank"
    got = f"the argument is a {type(x).__name__}, which holds the local tensors of {count} ranks"
    needed = "a global tensor or a DTensor"
    return TreeError.of(where, got, needed=needed, fix=fix, arg_path=path)


def _refuse_foreign(where: str, path: str, x: torch.Tensor) -> None:
    """Refuse a tensor subclass of the user's, whose result would be a plain tensor."""
    if not _compat.is_foreign(x) or isinstance(x, DTensor):
        return
    fix, source = f"{path}.as_subclass(torch.Tensor)", call_site()
    got = f"a {type(x).__name__}, a subclass of torch.Tensor"
    raise TreeError.of(
        where, got, needed="a plain tensor or a DTensor", fix=fix, source=source, arg_path=path
    )


def _is_function(x: Any) -> bool:
    """Return whether x is a function. An object with `__call__` is not one, since it may change
    between calls.
    """
    known = isinstance(
        x,
        (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, type),
    )
    return known or (
        callable(x)
        and (hasattr(x, "__wrapped__") or (type(x).__module__ or "").startswith("torch._ops"))
    )


def _instead(x: Any, path: str) -> str:
    """Suggest in an error what to pass in place of an object."""
    kind = type(x).__name__
    if isinstance(x, torch.nn.Module):
        if any(isinstance(p, DTensor) for p in x.parameters()):
            return "close over the module; or add it to static_argnums of jit"
        return (
            "fn, params, buffers = sf.functionalize(module), and pass params and buffers as "
            "arguments"
        )
    if path == "self":
        bound = (
            "transform the bound method: at capture, shardfn then reads the object of the method"
        )
        return f"{bound}; or use static_argnums=0 of jit or shard; or make {kind} a NamedTuple"
    is_mask = kind == "BlockMask"  # of flex_attention
    if is_mask or isinstance(x, (slice, range, set, frozenset, type(...))):
        return f"use static_argnums of jit or shard; or close over the {kind}"
    if type(x).__module__ == "numpy":
        return "torch.as_tensor(x); or x.item() for a constant"
    return (
        "use torch.as_tensor(x) for an array; use a dict, list, tuple or NamedTuple in place "
        "of a class that holds tensors"
    )


def marks_of_arguments(
    request: Request, arguments: Arguments, tensors: Sequence[int], mesh: Any
) -> tuple[MeshPlacements, ...]:
    """Determine the placements of every tensor argument from `in_placements` and DTensors.

    Args:
        request: the request with the `in_placements`.
        arguments: of the call.
        tensors: which leaves are tensors.
        mesh: of the call.

    Raises:
        TreeError: `in_placements` does not match the arguments.
        PlacementError: placements that do not fit, all listed.
    """
    leaves, axes = arguments.leaves, axes_of(mesh)
    specs = specs_of(request, arguments)
    marks: list[MeshPlacements] = []
    wrong: list[tuple[str, str]] = []
    for i in tensors:
        try:
            marks.append(_marks(leaves[i], specs[i], mesh, axes))
        except ValueError as error:
            wrong.append((arguments.paths[i], str(error)))
    if wrong:
        raise _misfit(request, mesh, wrong)
    return tuple(marks)


def _misfit(request: Request, mesh: Any, wrong: list[tuple[str, str]]) -> PlacementError:
    """Build the PlacementError that lists all placements that do not fit."""
    path, first = wrong[0]
    where, lines = f"{request.name}, argument {path}", [first]
    if len(wrong) > 1:
        where = f"{request.name}, {len(wrong)} arguments"
        lines = ["in_placements do not fit the arguments", *(f"{p}: {e}" for p, e in wrong)]
    fix = (
        "use placements that fit each tensor and the mesh, such as P('axis'), or None to keep "
        "the argument's placement"
    )
    source = call_site()
    return PlacementError.of(
        where,
        *lines,
        fix=fix,
        source=source,
        arg_path=path,
        mesh=mesh,
        placements=request.in_placements,
    )


def specs_of(request: Request, arguments: Arguments) -> list[Any]:
    """The part of `in_placements` for each leaf of the arguments. None: it keeps its own.

    Raises:
        TreeError: they do not match the arguments.
    """
    prefix = request.in_placements
    parameters = argnums.all_parameters(arguments.signature)
    opened, count = arguments.opened, len(arguments.leaves)
    specs, wrong = tree_pairs.by_parameter(prefix, parameters, *opened, is_spec, count)
    if not wrong:
        return specs
    lines = ["the tree of in_placements does not match the arguments", *wrong]
    fix = (
        "give placements in the order of the parameters or by name; one P applies to a whole "
        "subtree"
    )
    source = call_site()
    raise TreeError.of(request.name, *lines, fix=fix, source=source, placements=prefix)


def _check_device(device: torch.device, device_type: str) -> None:
    """Check that an argument lives on the device of this rank. Raises ValueError if not."""
    if device.type == "meta":
        return
    if device.type != device_type:
        raise ValueError(
            f"the tensor is on {device}, but the mesh is over {device_type} devices; move the "
            "tensor with x.to(...)"
        )
    if unnumbered(device).index is not None:
        raise ValueError(
            f"the tensor is on {device}, but this rank's device is {numbered(device_type)}; "
            f"call torch.{device_type}.set_device(number) first, or x.to({device_type!r})"
        )


def _marks(x: Any, spec: Any, mesh: Any, axes: MeshAxes) -> MeshPlacements:
    """Determine the placements of one argument from its spec. Raises ValueError if the spec does
    not fit.
    """
    if isinstance(x, torch.Tensor) and mesh is not None:
        _check_device(x.device, mesh.device_type)
    declared = None if spec is None or spec is AUTO else marks_of(spec, x.shape, axes)
    if not isinstance(x, DTensor):
        check_whole(spec, declared or ())
        return declared or ("R",) * len(axes.names)
    if x.device_mesh != mesh:
        got = f"the DTensor is on another mesh, {axes_of(x.device_mesh)}"
        raise ValueError(f"{got}, and the function's is {axes}")
    own = marks_of(list(x.placements), x.shape, axes)
    check_pending(own, x.dtype)
    if declared is None:
        return own
    if not layout.agree(own, declared, axes.sizes):
        raise ValueError(
            f"the argument is placed {describe(own, axes)}, but in_placements says "
            f"{describe(declared, axes)}; redistribute the argument before the call"
        )
    return declared


def marks_of_closed_over(
    name: str, x: torch.Tensor, node: torch.fx.Node, mesh: Any, axes: MeshAxes
) -> MeshPlacements:
    """The placements of a closed-over tensor, the input `node` of the program: a plain one is
    replicated. A DTensor on a part of the mesh is replicated over the other axes. In the code of
    one rank it has one more dim, of each rank's own tensors.

    Raises:
        PlacementError: a DTensor of another mesh.
    """
    if not isinstance(x, DTensor) or mesh is None:
        return ("R",) * len(axes.names)
    if node.meta["val"].dim() > x.dim():
        return marks_of([Shard(0)] * len(axes.names), (mesh.size(),), axes)
    if is_on_part(x, mesh):
        return marks_of(list(placements_on(x, mesh)), x.shape, axes)
    if x.device_mesh != mesh:
        where = f"{name}, a closed-over DTensor"
        refuse_other(where, x.device_mesh, mesh)
    return marks_of(list(x.placements), x.shape, axes)


ATTRIBUTE = "_shardfn_dynamic"  # of a marked tensor: its Dims
Dims = dict[int, bool]  # dim -> whether it is an error if its size must be constant
FORM = (
    "a prefix tree over the arguments, or a dict of them by name; a leaf is a dim, a set of "
    "dims, True for all dims, a dict {dim: torch.export.Dim.AUTO or Dim.DYNAMIC}, or None"
)
HINTS = {"AUTO": False, "DYNAMIC": True}


def marked(x: Any) -> Dims:
    """Return the dims that `mark_dynamic` has marked, ours or torch's."""
    if not isinstance(x, torch.Tensor):
        return {}
    return {**_compat.torch_marks(x), **getattr(x, ATTRIBUTE, {})}


def dims_of(request: Request, arguments: Arguments) -> dict[int, Dims]:
    """Collect, for each leaf of the arguments, the dims whose sizes may change between calls.

    Raises:
        TreeError: `dynamic` does not fit the arguments. Lists all mismatches.
    """
    leaves = arguments.leaves
    specs = _dynamic_specs(request, arguments)
    if request.around is not None:  # a rank's own tensors have their marks by now
        specs = [
            None if hasattr(x, ATTRIBUTE) else spec for x, spec in zip(leaves, specs, strict=True)
        ]
    rows = list(zip(specs, leaves, arguments.paths, strict=True))
    wrong = [f"{path}: {got}" for spec, x, path in rows for got in _misfits(spec, x)]
    if wrong:
        needed = "dims of tensors"
        path = wrong[0].split(":")[0]
        raise _other_dims(request, wrong, needed, arg_path=path)
    found = {i: _with_marks(spec, x) for i, (spec, x, _) in enumerate(rows)}
    return {i: dims for i, dims in found.items() if dims}


def _with_marks(spec: Any, x: Any) -> Dims:
    """Merge the dynamic dims of one leaf that `dynamic=` gives and that
    `mark_dynamic` has marked.
    """
    return {**marked(x), **_dims(spec, x)}


def _other_dims(request: Request, lines: Sequence[str], needed: str, **fields: Any) -> TreeError:
    """Build the error for a `dynamic=` option that does not fit the arguments."""
    where, source = f"{request.name}, dynamic", call_site()
    return TreeError.of(where, *lines, needed=needed, fix=FORM, source=source, **fields)


def _dynamic_specs(request: Request, arguments: Arguments) -> list[Any]:
    """Broadcast the prefix tree `dynamic=` to one entry for each leaf of the arguments."""
    prefix = request.dynamic
    if prefix is None:
        return [None] * len(arguments.leaves)
    if _is_dims(prefix):  # of every tensor
        kinds = (torch.Tensor, ShapeDtype)
        return [prefix if isinstance(x, kinds) else None for x in arguments.leaves]
    try:
        return tree_pairs.spread(_by_argument(request, arguments), arguments.opened, _is_dims)
    except ValueError as error:
        needed = "a prefix of the arguments"
        raise _other_dims(request, error.args, needed) from None


def _by_argument(request: Request, arguments: Arguments) -> tuple[Any, dict[str, Any]]:
    """Arrange `dynamic=` as a prefix tree of (args, kwargs)."""
    prefix, kwargs, count = request.dynamic, arguments.kwargs, len(arguments.args)
    if isinstance(prefix, dict):
        _refuse_unknown(request, prefix, arguments)
        named = {name: prefix.get(name) for name in kwargs}
        return tuple(prefix.get(name) for name in arguments.names), named
    if not isinstance(prefix, (tuple, list)):
        got = f"a {type(prefix).__name__}"
        raise _other_dims(request, [got], "dims of the arguments")
    if len(prefix) > count:
        got = f"{len(prefix)} entries for {count} positional arguments"
        raise _other_dims(request, [got], "one entry for each argument")
    return (*prefix, *(None for _ in range(count - len(prefix)))), dict.fromkeys(kwargs)


def _refuse_unknown(request: Request, prefix: dict[Any, Any], arguments: Arguments) -> None:
    """Refuse a name in `dynamic=` that is no parameter.

    Raises:
        TreeError: names each.
    """
    signature = arguments.signature
    known = {*arguments.names, *arguments.kwargs}
    known |= {*(signature.parameters if signature is not None else ())}
    unknown = [repr(name) for name in prefix if name not in known]
    if unknown:
        got = f"there is no argument {', '.join(unknown)}"
        raise _other_dims(request, [got], f"names among {', '.join(sorted(known))}")


def _is_dims(x: Any) -> bool:
    """Return whether an entry of `dynamic=` is a leaf: a dim, dims, or None."""
    if isinstance(x, dict):
        return any(_compat.dim_hint(hint) is not None for hint in x.values())
    return x is None or isinstance(x, (bool, int, set, frozenset))


def _misfits(spec: Any, x: Any) -> Iterator[str]:
    """Describe how an entry of `dynamic=` does not fit its argument."""
    if spec is None or spec is True or spec is False or x is None:
        return
    if not isinstance(x, (torch.Tensor, ShapeDtype)):
        yield f"a {type(x).__name__} has no dims"
        return
    rank = len(x.shape)
    for dim in _given(spec):
        if not isinstance(dim, int) or isinstance(dim, bool):
            yield f"{dim!r} is not a dim"
        elif not -rank <= dim < rank:
            yield f"the tensor has no dim {dim}: its shape is {tuple(x.shape)}"
    if isinstance(spec, dict):
        hints = {dim: _compat.dim_hint(hint) for dim, hint in spec.items()}
        wrong = [dim for dim, hint in hints.items() if hint is None and spec[dim]]
        yield from (f"{spec[dim]!r} is not a hint for dim {dim}" for dim in wrong)


def _given(spec: Any) -> list[Any]:
    """Return the dims that an entry of `dynamic=` names."""
    return [spec] if isinstance(spec, int) else [*spec]


def _dims(spec: Any, x: Any) -> Dims:
    """Normalize an entry of `dynamic=` for one argument to dims and whether each is strict."""
    if spec is None or spec is False or not isinstance(x, (torch.Tensor, ShapeDtype)):
        return {}
    rank = len(x.shape)
    if spec is True:
        return dict.fromkeys(range(rank), False)
    if isinstance(spec, dict):
        hints = {dim % rank: _compat.dim_hint(h) for dim, h in spec.items()}
        return {dim: HINTS[h] for dim, h in hints.items() if h in HINTS}
    return {dim % rank: False for dim in _given(spec)}


OF_RANKS = (SimulatedTensor, UnreadTensor)  # each rank's own, which no program takes


def other_leaves(request: Request, placed: Placed, leaves: list[Any], treedef: Any) -> list[str]:
    """Describe the leaves of two argument trees that have no counterpart."""
    now, before = _tree.unflatten(treedef, leaves), _indices(placed.treedef)
    names = _tree.argument_paths(request.signature_of, *now)
    gone = _lacking(before, placed.paths, now)
    new = _lacking(now, names, before)
    if new or gone:
        return [
            *(f"{path}: missing" for path in gone),
            *(f"{path}: the program has no such leaf" for path in new),
        ]
    kinds, wanted = (_tree.containers(t) for t in (treedef, placed.treedef))
    return [f"the containers are {kinds}, but the program was compiled for {wanted}"]


def _indices(treedef: Any) -> Any:
    """Build a tree that holds the position of each leaf."""
    return _tree.unflatten(treedef, range(treedef.num_leaves))


def _lacking(tree: Any, names: Sequence[str], other: Any) -> list[str]:
    """List the leaf names of one tree that another tree lacks."""
    known = set(_tree.paths(other))
    places = _tree.paths(tree)
    return [n for place, n in zip(places, names, strict=True) if place not in known]


def other_tensors(placed: Placed, leaves: list[Any]) -> Iterator[str]:
    """Describe the tensors whose shape, dtype or placement differs from the program's."""
    rows = zip(placed.tensors, placed.marks, placed.avals, strict=True)
    for i, marks, aval in rows:
        x, path = leaves[i], placed.paths[i]
        is_tensor = isinstance(x, torch.Tensor) and type(x) not in OF_RANKS
        if not is_tensor or (tuple(x.shape), x.dtype) != (aval.shape, aval.dtype):
            yield f"{path}: {said(x)}, the program is for {aval.shape} {aval.dtype}"
            continue
        if not isinstance(x, DTensor):
            continue
        own = marks_of(list(x.placements), x.shape, placed.axes)
        if not layout.agree(own, marks, placed.axes.sizes):
            wanted = f"the program is for {describe(marks, placed.axes)}"
            yield f"{path}: placed {describe(own, placed.axes)}, {wanted}"


def other_constants(placed: Placed, leaves: list[Any]) -> Iterator[str]:
    """Describe the constants that differ from the program's."""
    for i, key, old in placed.constants:
        if constant_key(leaves[i]) != key:
            yield f"{placed.paths[i]}: {said(leaves[i])}, the program is for {old!r}"


def said(x: Any) -> str:
    """Print a leaf in an error: a tensor by its shape and dtype."""
    return f"{tuple(x.shape)} {x.dtype}" if isinstance(x, torch.Tensor) else repr(x)
