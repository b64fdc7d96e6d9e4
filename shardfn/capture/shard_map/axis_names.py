"""Axis names while a function is traced. Each is bound to a mesh axis or to the mapped dim of a
vmap.

Dynamo runs these functions on constants, so errors reach the user unchanged.
"""

from __future__ import annotations

import contextlib
import contextvars
import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs

from ... import _compat
from ...errors import CaptureError, PlacementError
from ...mesh import (
    axes_of,
    check_mesh,
    current_mesh,
    entered_meshes,
    real_mesh,
    refuse_other,
    refuse_unusable_mesh,
    restore_meshes,
)
from ...placement import P, Stage, check_axes, check_numbers, check_stages, names_of
from ...types import MeshAxes

MESH = -1  # the level of a name that is a mesh axis


@attrs.frozen
class Bound:
    """A name that collectives may use, bound to a mesh axis or to the mapped dim of a vmap."""

    name: str
    size: int
    level: int


@attrs.define
class Scope:
    """The meshes and axis names of one capture."""

    mesh: Any  # the call's, or the first that a shard_map inside brings along
    device: str
    # it is refused as code of global tensors, and read again
    may_be_of_ranks: bool = False
    own: Any = None  # the first mesh that a transform inside names itself
    brought: Any = None  # the first mesh that a shard_map inside names itself
    uses_mesh: bool = False  # whether the Program depends on the mesh's names and sizes
    names: list[Bound] = attrs.field(factory=list)  # the innermost last
    before: tuple[Any, ...] = attrs.field(factory=entered_meshes)  # the meshes entered outside
    # the coordinate of the rank whose code is read, or nothing as long as all share a program
    rank: tuple[int, ...] | None = None
    # the local shapes that its program depends on: `dtensors.own_sizes`
    cuts: list[Any] = attrs.field(factory=list)
    are_dtensors: dict[Any, bool] = attrs.field(factory=dict)  # of `dtensors.values`
    parts: list[Any] = attrs.field(factory=list)  # closed-over DTensors on a part
    closes_over: bool = False  # a DTensor, read as a global tensor
    rank_calls: list[str] = attrs.field(factory=list)  # which gave a number as a tensor
    group_ranks: list[Any] = attrs.field(factory=list)  # (a group, its ranks)
    losses: int = 0  # the `loss_parallel` contexts that are entered here

    def named_or_entered(self, mesh: Any) -> Any:
        """A mesh that a transform names, or the one that is entered around it in the function."""
        is_inside = len(entered_meshes()) > len(self.before)
        return current_mesh() if mesh is None and is_inside else mesh

    @property
    def manual(self) -> tuple[str, ...]:
        """The mesh axes that are manual here."""
        return tuple(b.name for b in self.names if b.level == MESH)

    @property
    def meshes(self) -> tuple[Any, Any, Any]:
        """The mesh that the Program depends on, the one that it names, and the one of a
        shard_map inside.
        """
        return self.mesh if self.uses_mesh else None, self.own, self.brought

    def over(self, mesh: Any) -> Scope:
        """The active scope, with the meshes that this one has named, for a call over a mesh."""
        here = current_scope()
        here.mesh = mesh or self.mesh
        here.own = self.own
        here.brought = self.brought
        here.uses_mesh = self.uses_mesh
        return here


_scope: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("shardfn_names", default=None)


@contextlib.contextmanager
def scope(
    mesh: Any, device: str, may_be_of_ranks: bool = False, rank: tuple[int, ...] | None = None
) -> Iterator[Scope]:
    """The context with the scope of one capture."""
    inner = Scope(mesh, device, may_be_of_ranks, rank=rank)
    token = _scope.set(inner)
    try:
        yield inner
    finally:
        _scope.reset(token)
        restore_meshes(inner.before)


def current_scope() -> Scope:
    """The scope of the active capture, or an empty one."""
    return _scope.get() or Scope(None, "cpu")


@_compat.constant_in_graph
def begin() -> None:
    """Reset the scope for a new trace: Dynamo may restart its trace."""
    here = current_scope()
    here.names.clear()
    here.rank_calls.clear()
    restore_meshes(here.before)


@_compat.constant_in_graph
def enter_mesh(where: str, mesh: Any, requested: tuple[str, ...] | None) -> Any:
    """Make mesh axes manual.

    Args:
        where: the name of the shard_map in errors.
        mesh: its mesh, or None for the mesh of the call.
        requested: the axes to make manual, or None for all that are not manual yet.

    Returns:
        ((name, size), ...) of the axes that are manual from here on.

    Raises:
        PlacementError: no mesh, another mesh than the call's, a mesh of a world that has ended,
            an unknown axis, one that is manual already.
    """
    here = current_scope()
    _determine_mesh(where, _checked_mesh(where, mesh), here)
    axes = axes_of(here.mesh)
    taken = here.manual
    _check_wanted(where, requested or (), axes)
    _refuse_manual(where, requested or (), taken, axes)
    manual = [
        (name, size)
        for name, size in zip(axes.names, axes.sizes, strict=True)
        if name not in taken and (requested is None or name in requested)
    ]
    here.names += [Bound(name, size, MESH) for name, size in manual]
    return tuple(manual)


def _checked_mesh(where: str, mesh: Any) -> Any:
    """A mesh that Dynamo passes, or None.

    Raises:
        PlacementError: it is not a DeviceMesh.
    """
    mesh = real_mesh(mesh)
    check_mesh(where, mesh, or_none=True)
    return mesh


def _determine_mesh(where: str, mesh: Any, here: Scope) -> None:
    """Determine the mesh of a scope: the call's, or that of the first shard_map inside that has
    one.
    """
    mesh = here.named_or_entered(mesh)
    if mesh is not None:
        _name_mesh(where, mesh, here)
        here.brought = here.brought or mesh
        here.mesh = here.mesh or mesh
    if here.mesh is None:
        raise PlacementError.of(
            where,
            "no mesh is given, and no current mesh is set",
            fix="shard_map(fn, mesh, ...), or call the function inside `with use_mesh(mesh)`",
        )
    here.uses_mesh = True


def _name_mesh(where: str, mesh: Any, here: Scope) -> None:
    """Record a mesh that a transform inside the function names.

    Raises:
        PlacementError: its world has ended, or it differs from the call's or from another that
            the function names.
    """
    refuse_unusable_mesh(where, mesh)
    for other in (here.mesh, here.own):
        if other is not None:
            refuse_other(where, mesh, other)
    here.own = here.own or mesh


def _check_wanted(where: str, requested: Sequence[str], axes: MeshAxes) -> None:
    """Check that the mesh has the axes that are to be manual.

    Raises:
        PlacementError: names the first missing axis.
    """
    for name in requested:
        if name not in axes.names:
            raise PlacementError.of(
                f"{where}, axis_names",
                f"the mesh {axes} has no axis {name!r}",
                fix=suggest_name(name, axes.names),
            )


def _refuse_manual(
    where: str, requested: Sequence[str], taken: Sequence[str], axes: MeshAxes
) -> None:
    """Refuse axes that are manual already, and a shard_map without any axis left.

    Raises:
        PlacementError: naming the axes.
    """
    again = [name for name in requested if name in taken]
    is_full = len(taken) == len(axes.names)
    if not again and not is_full:
        return
    fix = "give axis_names only axes that no enclosing shard_map uses"
    if is_full:
        fix = "one shard_map over these axes"
    raise PlacementError.of(
        where, f"an enclosing shard_map already uses {', '.join(again or taken)}", fix=fix
    )


@_compat.constant_in_graph
def name_mesh(where: str, mesh: Any) -> None:
    """Record the mesh of a `shard` inside the function, whose placements are constraints on
    that mesh.

    Raises:
        PlacementError: its world has ended, or it differs from the call's.
    """
    mesh = current_scope().named_or_entered(mesh)
    if mesh is not None:
        _name_mesh(where, _checked_mesh(where, mesh), current_scope())


@_compat.constant_in_graph
def bind_mapped_dim(name: str, size: int) -> None:
    """Bind a name to the mapped dim of the innermost vmap."""
    current_scope().names.append(Bound(name, size, _compat.innermost_level()))


@_compat.constant_in_graph
def unbind_last(count: int) -> None:
    """Unbind the last names."""
    here = current_scope()
    del here.names[len(here.names) - count :]


@_compat.constant_in_graph
def bindings_of(what: str, axis_name: Any) -> Any:
    """The mesh axes or mapped dims to which axis names are bound, the outermost first.

    Args:
        what: the collective.
        axis_name: a name or a tuple of names.

    Returns:
        ((name, size, level), ...); the level is MESH for a mesh axis.

    Raises:
        CaptureError: a name is not bound. Lists the bound names.
    """
    here = current_scope()
    known = {b.name: b for b in here.names}
    wanted = (
        (axis_name,)
        if isinstance(axis_name, str)
        else tuple(axis_name)
        if isinstance(axis_name, (tuple, list))
        else None
    )
    if wanted is None or not wanted or not all(isinstance(n, str) for n in wanted):
        raise CaptureError.of(
            what, f"axis_name is {axis_name!r}", needed="a name, or a tuple of names"
        )
    for name in wanted:
        if name not in known:
            raise _unbound(what, name, here, tuple(known.values()))
    if len(set(wanted)) < len(wanted):
        raise CaptureError.of(
            what,
            f"axis_name is {axis_name!r}, which contains an axis twice",
            needed="each name once",
        )
    return tuple((b.name, b.size, b.level) for b in (known[name] for name in wanted))


def _unbound(what: str, name: str, here: Scope, bound_names: tuple[Bound, ...]) -> CaptureError:
    if not bound_names:
        fix = "make the call inside shard_map, or inside vmap(fn, axis_name=...)"
        return CaptureError.of(
            f"{what} over {name!r}",
            "the call is outside of any shard_map, so no axis name is bound",
            fix=fix,
        )
    kind = lambda b: "mesh axis" if b.level == MESH else "mapped by vmap"
    listed = ", ".join(f"{b.name!r} ({kind(b)}, size {b.size})" for b in bound_names)
    if here.mesh is not None and name in axes_of(here.mesh).names:
        fix = f"add {name!r} to axis_names of the enclosing shard_map"
        return CaptureError.of(
            what,
            f"{name!r} is a mesh axis that no enclosing shard_map uses",
            f"the bound axis names are {listed}",
            fix=fix,
        )
    fix = suggest_name(name, [b.name for b in bound_names])
    return CaptureError.of(
        what, f"no axis is called {name!r}", f"the bound axis names are {listed}", fix=fix
    )


def suggest_name(name: str, names: Iterable[str]) -> str:
    """A suggestion: the known name most similar to another one, or all of them."""
    names = list(names)
    similar = difflib.get_close_matches(str(name), names, 1, 0.4)
    return f"did you mean {similar[0]!r}?" if similar else f"one of {', '.join(map(repr, names))}"


@_compat.constant_in_graph
def device() -> str:
    """The device type of the program that is captured."""
    return current_scope().device


@_compat.constant_in_graph
def check_placed(
    what: str, path: str, parts: tuple[Any, ...], stages: tuple[tuple[str, Any, int], ...] = ()
) -> None:
    """Check the axes of a placement inside a program: they exist, each is used once, and they
    are not manual.

    Args:
        what: the function, for errors.
        path: of the value.
        parts: the axes of each dim, as `P` takes them.
        stages: (axis, coordinate, chunk).

    Raises:
        PlacementError: naming the axes, or a stage that is not a number.
    """
    where = f"{what}, {path}" if path else what
    spec = P(*parts, **{axis: Stage(k, chunk) if chunk else k for axis, k, chunk in stages})
    try:
        every = [name for names in names_of(spec) for name in names] + [*spec.stages]
        check_axes(spec)
        check_stages(spec)
    except ValueError as error:
        fix = "name each axis once"
        raise PlacementError.of(where, str(error), fix=fix, placements=spec) from None
    wrong = [name for name in every if name in current_scope().manual]
    if wrong:
        fix = (
            "give this axis only in in_placements and out_placements, or leave it out of axis_names"
        )
        raise PlacementError.of(
            where,
            f"{spec} names {', '.join(wrong)}, which belongs to an enclosing shard_map",
            fix=fix,
        )


@_compat.constant_in_graph
def check_stage(what: str, path: str, coordinate: Any, chunk: Any) -> None:
    """Check a stage inside a program, whose axis is found later.

    Raises:
        PlacementError: its coordinate or chunk is not a number from 0.
    """
    stage = Stage(coordinate, chunk)
    try:
        check_numbers(stage)
    except ValueError as error:
        where = f"{what}, {path}" if path else what
        raise PlacementError.of(where, str(error), fix="sf.Stage(0)", placements=stage) from None


@_compat.constant_in_graph
def check_dims(what: str, path: str, parts: tuple[Any, ...], shape: tuple[int, ...]) -> None:
    """Check that a placement has no more parts than a tensor has dims, where partition cannot
    check it.

    Raises:
        PlacementError: it has more.
    """
    is_seen = current_scope().mesh is not None and any(parts[len(shape) :])
    if len(parts) > len(shape) and not is_seen:
        where = f"{what}, {path}" if path else what
        raise PlacementError.of(
            where,
            f"{P(*parts)} names dim {len(parts) - 1} of a tensor with {len(shape)} dims, "
            f"shape {shape}",
            fix=f"P with at most {len(shape)} entries",
            placements=P(*parts),
            dim=len(parts) - 1,
        )
