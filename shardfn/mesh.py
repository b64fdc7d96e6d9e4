"""Device meshes: `make_mesh`, `use_mesh`, and functions that return the axes, world and ranks of a
mesh.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.weak import WeakIdKeyDictionary

from . import _compat
from .accepted import accept
from .errors import PlacementError, call_site
from .hardware import Link, costs_of_links
from .mesh_arguments import check_shape, check_tuples, checked_timeout, checked_type, refuse_absent
from .types import Cost, MeshAxes
from .world import World, current_world, default_device_type, groups_of, is_alone, join_world

SHOWN = 16  # ranks of a mesh in an error

# each with the number of meshes that were entered by torch's `with mesh:` before
_stack: contextvars.ContextVar[tuple[tuple[DeviceMesh, int], ...]] = contextvars.ContextVar(
    "shardfn_meshes", default=()
)
_known_meshes = WeakIdKeyDictionary()  # live mesh -> its axes and its world


def make_mesh(
    shape: Sequence[int],
    axis_names: Sequence[str],
    device_type: str | None = None,
    *,
    links: Mapping[str, Link] | None = None,
    timeout: float | timedelta | None = None,
) -> DeviceMesh:
    """Arrange the ranks of the current world in a grid with named axes.

    Args:
        shape: the number of ranks along each axis. The product of the numbers in `shape` must be
            the size of the world.
        axis_names: one name for each axis.
        device_type: the type of the devices, such as "cuda"; by default, the type of torch's
            default device.
        links: a `Link` for each axis, if the axes differ in speed. With `links`, sharding
            propagation assigns a higher cost to the bytes that are sent over a slow axis.
        timeout: the seconds that processes may take to connect, and that each collective of the
            mesh and of the world may take. By default, `timeout` is the timeout of the process
            group, or torch's default timeout.

    Returns:
        A DeviceMesh. Under torchrun, `make_mesh` also initialises the process group, if no process
        group exists.

    Raises:
        PlacementError: the shape does not fit the world, the names do not fit the shape, or the
            links do not fit the names.
        RendezvousError: the processes cannot connect within the timeout.
        DivergenceError: the processes create different meshes.

    Source: jax.make_mesh.

    Example:
        >>> import shardfn as sf
        >>> with sf.fake_world(8):
        ...     sf.make_mesh((2, 4), ("dp", "tp")).shape
        (2, 4)
    """
    accept("make_mesh", device_type=device_type)
    check_tuples(shape, axis_names)
    shape, names = tuple(shape), tuple(axis_names)
    check_shape(shape, names)
    device_type = checked_type(device_type or default_device_type())
    costs = _check_links(names, links)
    seconds = checked_timeout(timeout)
    refuse_absent(device_type)
    if is_alone():
        _check_size(shape)  # before it makes a process group
    join_world(device_type, seconds)
    request = f"shape {shape}, axis names {names}, device {device_type}, links {links}"
    with groups_of("make_mesh", request, seconds):
        _check_size(shape)
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    _known_meshes[mesh] = MeshAxes(names, shape, costs), current_world()
    return mesh


def _check_size(shape: tuple[int, ...]) -> None:
    """Check that a shape has as many ranks as the world.

    Raises:
        PlacementError: it has more or fewer.
    """
    size, needed = current_world().size, math.prod(shape)
    if needed == size:
        return
    fix = f"use a shape whose product is {size}, or fake_world({needed})"
    if is_alone():
        fix = f"`with sf.fake_world({needed}):` around it, or torchrun --nproc-per-node={needed}"
    got = f"shape {shape} needs {needed} ranks, but the world has {size}"
    raise PlacementError.of("make_mesh", got, fix=fix)


def check_mesh(where: str, mesh: Any, *, or_none: bool = False) -> None:
    """Check that an argument is a DeviceMesh.

    Raises:
        PlacementError: it is not a DeviceMesh.
    """
    if not isinstance(mesh, DeviceMesh) and not (or_none and mesh is None):
        fix = "sf.make_mesh(shape, axis_names)"
        raise PlacementError.of(
            f"{where}, mesh", f"a {type(mesh).__name__}", needed="a DeviceMesh", fix=fix
        )


def _check_links(names: tuple[str, ...], links: Mapping[str, Link] | None) -> tuple[Cost, ...]:
    """Check the links of the axes, and convert them to costs."""
    if links is None:
        return ()
    fix = "links={" + ", ".join(f"{x!r}: Link(latency=..., bandwidth=...)" for x in names) + "}"
    if not isinstance(links, Mapping) or set(links) != set(names):
        got = (
            f"links for {', '.join(map(str, links)) or 'no axis'}"
            if isinstance(links, Mapping)
            else f"links is a {type(links).__name__}"
        )
        raise PlacementError.of(
            "make_mesh, links",
            got,
            needed=f"one link for each mesh axis: {', '.join(names)}",
            fix=fix,
        )
    for name, link in links.items():
        if not isinstance(link, Link) or not _is_priced(link):
            raise PlacementError.of(
                f"make_mesh, links[{name!r}]",
                f"it is {link!r}",
                needed="an sf.Link with latency in seconds and bandwidth in bytes per second",
                fix=fix,
            )
    return costs_of_links([links[name] for name in names])


def _is_priced(link: Link) -> bool:
    figures = link.latency, link.bandwidth
    are_numbers = all(isinstance(x, (int, float)) for x in figures)
    return are_numbers and link.latency >= 0 and 0 < link.bandwidth < math.inf


@contextlib.contextmanager
def use_mesh(mesh: DeviceMesh) -> Iterator[DeviceMesh]:
    """Make a mesh the current mesh inside a `with` statement. `use_mesh` statements can be nested,
    and apply only to the current thread.

    Args:
        mesh: the mesh that `current_mesh()` returns inside the `with` statement.

    Returns:
        The mesh.

    Raises:
        PlacementError: mesh is not a DeviceMesh.

    Source: jax.sharding.use_mesh; PyTorch PR 101202.

    Example:
        >>> import shardfn as sf
        >>> with sf.fake_world(2), sf.use_mesh(sf.make_mesh((2,), ("dp",))):
        ...     sf.current_mesh().ndim
        1
    """
    check_mesh("use_mesh", mesh)
    outer = entered_meshes()
    enter(mesh)
    try:
        yield mesh
    finally:
        restore_meshes(outer)


def enter(mesh: DeviceMesh) -> None:
    """Make a mesh the current one, until `leave`."""
    _stack.set((*_stack.get(), (mesh, len(_compat.entered_meshes()))))


def leave() -> None:
    """Leave the mesh that was entered last."""
    _stack.set(_stack.get()[:-1])


def entered_meshes() -> tuple[tuple[DeviceMesh, int], ...]:
    """Return the stack of entered meshes, the innermost last."""
    return _stack.get()


def restore_meshes(before: tuple[tuple[DeviceMesh, int], ...]) -> None:
    """Restore the stack of entered meshes, leaving all that were entered since."""
    _stack.set(before)


def current_mesh() -> DeviceMesh | None:
    """Return the mesh of the innermost `with use_mesh(mesh):` or `with mesh:` statement.
    `current_mesh` returns None if no mesh is current.

    Returns:
        A DeviceMesh or None.

    Example:
        >>> current_mesh() is None
        True
    """
    stack, torchs = _stack.get(), _compat.entered_meshes()
    mesh, before = stack[-1] if stack else (None, 0)
    return torchs[-1] if len(torchs) > before else mesh


def meshes_here() -> list[DeviceMesh]:
    """Return the root meshes of the current world that are in use."""
    here = current_world()
    meshes = [mesh for mesh, (_, world) in _known_meshes.items() if world is here]
    return [mesh for mesh in meshes if _compat.root_mesh(mesh) is mesh]


def same_mesh_now(mesh: DeviceMesh) -> DeviceMesh:
    """Return the equal mesh of the current world, for a mesh of an ended one: torch's caches give
    tensors the meshes of earlier worlds. The mesh itself if there is none.
    """
    if not is_of_ended_world(mesh):
        return mesh
    return next((known for known in meshes_here() if known == mesh), mesh)


WORLD_AXIS = "world"  # the axis of a mesh of all ranks


def mesh_of_world(device_type: str) -> DeviceMesh:
    """Make a mesh of all ranks on one axis. Works while a function is traced."""
    with _compat.values():
        return make_mesh((current_world().size,), (WORLD_AXIS,), device_type)


def axes_of(mesh: DeviceMesh | None) -> MeshAxes:
    """Return a mesh's axis names, sizes and costs. None has no axes."""
    if mesh is None:
        return MeshAxes((), ())
    axes, _ = _axes_and_world(mesh)
    return axes


def costs_of(mesh: DeviceMesh) -> dict[str, Cost]:
    """Return the costs of the axes of a mesh that has links, by name."""
    axes = axes_of(mesh)
    return dict(zip(axes.names, axes.costs, strict=True)) if axes.costs else {}


def world_of(mesh: DeviceMesh) -> World:
    """Return the world to whose ranks a mesh belongs."""
    _, world = _axes_and_world(mesh)
    return world


def _axes_and_world(mesh: DeviceMesh) -> tuple[MeshAxes, World]:
    """Look up the axes and the world of a mesh. A mesh that torch made belongs to the world of its
    root mesh; a root mesh belongs to the world in which it is first used.
    """
    record = _known_meshes.get(mesh)
    if record is None:
        names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
        root = _compat.root_mesh(mesh)
        world = current_world() if root is mesh else world_of(root)
        costs_of_links = {} if root is mesh else costs_of(root)
        of_names = tuple(costs_of_links[name] for name in names if name in costs_of_links)
        of_names = of_names if len(of_names) == len(names) else ()
        record = MeshAxes(tuple(names), tuple(mesh.shape), of_names), world
        _known_meshes[mesh] = record
    return record


def is_of_ended_world(mesh: DeviceMesh | None) -> bool:
    """Return whether a mesh belongs to a world that has ended."""
    return mesh is not None and world_of(mesh) is not current_world()


def refuse_unusable_mesh(where: str, mesh: DeviceMesh) -> None:
    """Refuse a mesh of an ended world, whose process groups are gone, and a mesh without this
    rank.

    Raises:
        PlacementError: says where to make the mesh, or which ranks it has.
    """
    here = current_world()
    if not is_of_ended_world(mesh):
        if here.kind != "simulated" and here.rank not in ranks_of(mesh):
            got = f"rank {here.rank} is not in the mesh, which has the ranks {ranks_of(mesh)}"
            fix = (
                "call the function only on ranks of the mesh: if mesh.get_coordinate() is not None"
            )
            raise PlacementError.of(where, got, fix=fix, source=call_site())
        return
    got = "the mesh belongs to a world that has ended"
    fix = "make the mesh inside the world that uses the mesh"
    if mesh.size() != here.size:
        got = f"the mesh has {mesh.size()} ranks, but the world has {here.size}"
    source, needed = call_site(), "a mesh over the current world"
    raise PlacementError.of(where, got, needed=needed, fix=fix, source=source, mesh=mesh)


def real_mesh(mesh: Any) -> Any:
    """Return the mesh behind Dynamo's stand-in (torch 2.13). Any other object is returned as it
    is.
    """
    return getattr(mesh, "real_obj", mesh)


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """Return the ranks of a mesh, in row-major order. Works while a function is traced."""
    with _compat.values():
        return mesh.mesh.flatten().tolist()


def _ranks(mesh: DeviceMesh) -> str:
    """Format the first ranks of a mesh for an error. Works while a function is traced."""
    with _compat.values():
        ranks = mesh.mesh.flatten()[:SHOWN].tolist()
    more = ", ..." if mesh.size() > SHOWN else ""
    return f"ranks {', '.join(map(str, ranks))}{more}"


def refuse_other(where: str, mesh: DeviceMesh, around: DeviceMesh, fix: str = "") -> None:
    """Refuse a mesh that differs from the mesh of the enclosing call.

    Equal names and sizes are not enough, since two meshes may order the same ranks differently.

    Raises:
        PlacementError: naming both meshes.
    """
    if mesh == around:
        return
    axes, outer = axes_of(mesh), axes_of(around)
    got = f"the mesh used here is {axes}, but the enclosing call has the mesh {outer}"
    if (axes.names, axes.sizes) == (outer.names, outer.sizes):
        own, other = _ranks(mesh), _ranks(around)
        got = f"the mesh {axes} used here has {own}, but the mesh of the enclosing call has {other}"
    fix = fix or "pass the same mesh to both calls, or no mesh to the inner call"
    raise PlacementError.of(where, got, needed="one mesh", fix=fix, mesh=around)


def group_names(mesh: DeviceMesh | None) -> tuple[str, ...]:
    """Return the name under which each rank registers its process group of each axis. All ranks
    use the same text.
    """
    if mesh is None:
        return ()
    axes = axes_of(mesh)
    ranks = mesh.mesh.to(torch.int64).numpy().tobytes()
    layout = hashlib.sha256(repr(axes).encode() + ranks).hexdigest()[
        :8
    ]  # [0, 1] and [[0], [1]] hold the same ranks
    return tuple(f"shardfn:{layout}:{name}" for name in axes.names)


def all_coordinates(axes: MeshAxes) -> list[tuple[int, ...]]:
    """Return the coordinates of every rank of a mesh, in row-major order."""
    return list(itertools.product(*(range(n) for n in axes.sizes)))
