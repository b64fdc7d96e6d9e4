"""The mesh and the placements that a call of DTensor names, checked while a function is traced.

Dynamo runs these functions on constants, so errors reach the user unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import _compat
from ...errors import CaptureError, PlacementError
from ...mesh import (
    WORLD_AXIS,
    axes_of,
    check_mesh,
    current_mesh,
    real_mesh,
    refuse_unusable_mesh,
    same_mesh_now,
)
from ...ops.text_formats import parse_placed, print_placed
from ...simulated import uneven_dim
from ..refusals.unsupported_calls import IN_SHARD, MODULE_IN_SHARD, STYLES
from ..shard_map.axis_names import current_scope
from . import uneven_shards
from .flattened_meshes import home_of, refuse_flattened

CONSTRAINTS = (  # in `shard`
    "DTensor.redistribute",
    "DTensor.full_tensor",
    "distribute_tensor",
    "torch.distributed.tensor.zeros",
    "torch.distributed.tensor.ones",
    "torch.distributed.tensor.empty",
    "torch.distributed.tensor.full",
    "torch.distributed.tensor.rand",
    "torch.distributed.tensor.randn",
)
REDUCED = ("sum", "avg", "max", "min")
STAGE = "?Stage"  # the text of a placement on a stage


class NeedsRanks(CaptureError):
    """The error for code of one rank that was read as code of global tensors."""

    mesh: Any
    is_for_good: bool = True  # found out by reading the function, not by the arguments of a call


@_compat.constant_in_graph
def checked_placements(
    what: str,
    mesh: Any,
    before: str | None,
    placements: tuple[Any, ...] | None,
    shape: tuple[int, ...],
) -> Any:
    """The placements that a call names, checked, as rows of (axis, size, placement).

    Args:
        what: the call.
        mesh: that it names, or None for that of the DTensor or the current one.
        before: the placements of the DTensor, as text, if there is one.
        placements: the placement on each axis, as `S0`, `R` or `Psum`; None for all replicated.
        shape: of the tensor.

    Returns:
        ((axis, its size, placement), ...)

    Raises:
        NeedsRanks: outside of a shard_map.
        PlacementError: placements that do not fit the mesh or the tensor.
    """
    names, sizes = _axes_of_call(what, mesh, before)
    placements = ("R",) * len(names) if placements is None else placements
    if len(placements) != len(names):
        raise PlacementError.of(
            what,
            f"{len(placements)} placements for a mesh of {len(names)} axes {names}",
            fix="give one placement for each axis",
        )
    rows = zip(names, sizes, placements, strict=True)
    return tuple((name, n, _normalized_placement(what, p, shape)) for name, n, p in rows)


def _axes_of_call(
    what: str, mesh: Any, before: str | None
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The names and sizes of the mesh axes that a call works over, which are manual here."""
    here, mesh = current_scope(), real_mesh(mesh)
    if not among_global_tensors():
        refuse_stages(what, before)
    if mesh is None and before is not None:
        names = tuple(axis for axis, _ in parse_placed(before))
    else:
        around = here.mesh if among_global_tensors() else current_mesh()
        mesh = mesh if mesh is not None else around
        check_mesh(what, mesh)
        refuse_unusable_mesh(what, mesh)
        _refuse_stranger(what, mesh)
        names = axes_of(mesh).names
        if here.manual or among_global_tensors():
            refuse_flattened(what, mesh, here.mesh)
    free = [name for name in names if name not in here.manual]
    if free and not (what in CONSTRAINTS and among_global_tensors()):
        raise needs_ranks(what, mesh)
    known = dict(zip(axes_of(here.mesh).names, axes_of(here.mesh).sizes, strict=True))
    if before is not None and names != tuple(a for a, _ in parse_placed(before)):
        raise PlacementError.of(
            what,
            f"the DTensor is on {before}, but the call names a mesh with axes {names}",
            fix="use the mesh of the DTensor; for another mesh use "
            "DTensor.from_local(x.to_local(), mesh, placements)",
        )
    return names, tuple(known[name] for name in names)


def stages_in(placed: str) -> list[str]:
    """The axes of a DTensor's text that have stages of a pipeline."""
    return [axis for axis, placement in parse_placed(placed) if placement == STAGE]


def refuse_stages(what: str, placed: str | None) -> None:
    """Refuse a DTensor on a stage of a pipeline, in code of one rank.

    Raises:
        PlacementError: names the axis.
    """
    axes = stages_in(placed or "")
    if axes:
        raise PlacementError.of(
            what,
            f"the DTensor is on a pipeline stage of {axes[0]}, which torch's DTensor methods "
            "do not support",
            fix="sf.shard(f, mesh)(x), in which x is a global tensor",
        )


@_compat.constant_in_graph
def is_constraint() -> bool:
    """Whether a placement is a constraint here: among global tensors on a mesh, as in `shard`."""
    return among_global_tensors()


def among_global_tensors() -> bool:
    """Whether values here are global tensors on the mesh of the call, and stay so."""
    here = current_scope()
    return not here.may_be_of_ranks and here.mesh is not None and not here.manual


def needs_ranks(what: str, mesh: Any) -> NeedsRanks:
    """The NeedsRanks error of a call."""
    got = "the call belongs to code of one rank, but values are global tensors here"
    fix = IN_SHARD
    if _compat.is_reading(STYLES):
        what = f"a module of parallelize_module, {what}"
        fix = MODULE_IN_SHARD
    error = NeedsRanks.of(what, got, fix=fix)
    error.mesh = home_of(mesh) if mesh is not None else None
    return error


def check_closed_over(mesh: Any) -> None:
    """Check the mesh of a DTensor that a function closes over.

    Raises:
        NeedsRanks: values are global tensors here.
        PlacementError: its mesh is another one than that of the code here.
    """
    what = "a closed-over DTensor"
    mesh = same_mesh_now(mesh)
    refuse_unusable_mesh(what, mesh)
    _refuse_stranger(what, mesh)
    if not current_scope().manual and not among_global_tensors():
        raise needs_ranks(what, mesh)


def refuse_uneven_part(where: str, path: str, x: Any) -> None:
    """Refuse shards of different sizes on a part of the mesh, whose sizes other ranks cannot know.

    Raises:
        PlacementError: it has some.
    """
    dim = uneven_dim(x)
    if dim is None:
        return
    part = axes_of(x.device_mesh)
    raise PlacementError.of(
        where,
        f"a DTensor on the submesh {part} has shards of different sizes",
        fix="use a DTensor on the whole mesh, or a size divisible by the axis size",
        arg_path=path,
        dim=dim,
    )


@_compat.constant_in_graph
def mesh_axes_here() -> Any:
    """The axes of the mesh of the code here, and their sizes."""
    axes = axes_of(current_scope().mesh)
    return tuple(zip(axes.names, axes.sizes, strict=True))


def _refuse_stranger(what: str, mesh: Any) -> None:
    """Refuse a mesh that is neither the mesh of the program nor a part of it.

    Raises:
        PlacementError: naming both.
    """
    around = current_scope().mesh
    if around is None or not (current_scope().manual or among_global_tensors()):
        return
    if axes_of(around).names == (WORLD_AXIS,):  # of collectives that named no mesh
        raise needs_ranks(what, mesh)
    if mesh != around and _compat.root_mesh(mesh) != _compat.root_mesh(around):
        raise PlacementError.of(
            what,
            f"the mesh used here is {axes_of(mesh)}, but the surrounding code uses "
            f"{axes_of(around)}",
            needed="one mesh",
            fix="use the same mesh, or a submesh of that mesh: mesh['axis']",
            mesh=around,
        )


def _normalized_placement(what: str, placement: str, shape: Sequence[int]) -> str:
    """The placement with its dim counted from the front."""
    if placement[0] == "S":
        dim = int(placement[1:])
        if not -len(shape) <= dim < len(shape):
            got = f"Shard({dim}) of a tensor with {len(shape)} dims, shape {tuple(shape)}"
            needed = "a tensor with dims"
            if shape:
                needed = f"a dim from {-len(shape)} to {len(shape) - 1}"
            fix = "Shard of a dim that the tensor has, or Replicate()"
            raise PlacementError.of(what, got, needed=needed, fix=fix, dim=dim)
        return f"S{dim % len(shape)}"
    if placement == STAGE:
        got = "a placement on a pipeline stage, which torch's DTensor methods do not support"
        fix = "sf.constrain(x, P(axis=stage)) of a global tensor x, inside sf.shard"
        raise PlacementError.of(what, got, fix=fix)
    if placement[0] == "?" or (placement[0] == "P" and placement[1:] not in REDUCED):
        got = f"{placement[1:]} is not a placement that shardfn supports"
        needed = f"Shard, Replicate, or Partial of {', '.join(REDUCED)}"
        fix = "use Replicate(), and apply the op to values that are equal on all ranks"
        raise PlacementError.of(what, got, needed=needed, fix=fix)
    return placement


@_compat.constant_in_graph
def shards_of(what: str, rows: tuple[Any, ...], shape: tuple[int, ...]) -> str:
    """How mesh axes shard a global tensor of this shape, as text for the prims.

    Raises:
        PlacementError, NeedsOwnSizes: into shards of different sizes, where ranks share a program.
    """
    return uneven_shards.shards_of(what, rows, shape)


@_compat.constant_in_graph
def check_shape(what: str, rows: tuple[Any, ...], local: tuple[int, ...], shape: Any) -> str:
    """Check the global shape that `from_local` is given, if it is. Returns the shards as text.

    Raises:
        PlacementError: the local tensors of all ranks do not make it.
        NeedsOwnSizes: they may, if ranks have programs of their own.
    """
    found = list(local)
    for _, n, placement in rows:
        if placement[0] == "S":
            found[int(placement[1:])] *= n
    if shape is None or tuple(shape) == tuple(found):
        return uneven_shards.shards_of(what, rows, tuple(found))
    got = f"the global shape is {tuple(shape)}, but local tensors have shape {tuple(local)}"
    needed = f"the global shape {tuple(found)} for shards of equal size"
    if uneven_shards.ranks_may_differ():
        at = uneven_shards.coordinate_of_rank(what, got)
        mine = uneven_shards.local_shape(rows, shape, at)
        if mine == tuple(local):
            return uneven_shards.shards_of(what, rows, tuple(shape))
        place = ", ".join(f"{axis}={k}" for axis, k in at.items())
        needed = f"local tensors of shape {mine} on the rank at {place}"
    raise PlacementError.of(what, got, needed=needed, fix="pad the tensor")


@_compat.constant_in_graph
def check_stride(
    what: str, shape: tuple[int, ...], actual: tuple[int, ...], stated: tuple[int, ...]
) -> None:
    """Check the global strides that `from_local` is given, where a dim has several elements.

    Raises:
        PlacementError: the memory of the local tensors is another one.
    """
    is_long = len(stated) == len(actual)
    dims = [dim for dim, n in enumerate(shape) if n > 1]
    if is_long and all(stated[dim] == actual[dim] for dim in dims):
        return
    raise PlacementError.of(
        what,
        f"stride={stated} for a DTensor of shape {shape}",
        needed=f"stride {actual}, which matches the memory layout of the local tensors",
        fix=f"stride={actual}, or a contiguous local tensor: x.contiguous()",
    )


@_compat.constant_in_graph
def placements_text(rows: tuple[Any, ...]) -> str:
    """The text of placements, as `dp=S0,tp=R`."""
    return print_placed([(name, placement) for name, _, placement in rows])


@_compat.constant_in_graph
def placement_rows(what: str, text: str | None) -> Any:
    """The placements of a DTensor as rows of (axis, size, placement); unknown ones are refused.

    Raises:
        CaptureError: it is a plain tensor.
        PlacementError: torch has placed it in a way that shardfn does not know.
    """
    rows = placements_with_sizes(what, text)
    refuse_stages(what, text)
    refuse_unknown(what, text)
    return rows


def refuse_unknown(what: str, placed: str | None) -> None:
    """Refuse a DTensor at placements that its methods do not know, as a strided shard or a zigzag.

    Raises:
        PlacementError: names them with their axes.
    """
    rows = parse_placed(placed or "")
    wrong = [f"{placement[1:]} over {name}" for name, placement in rows if placement[0] == "?"]
    if wrong:
        raise PlacementError.of(
            what,
            f"torch gave the DTensor the unsupported placement {', '.join(wrong)}",
            needed="Shard or Replicate",
            fix="call x.redistribute(mesh, placements) with Replicate() or Shard(dim) first",
        )


def placements_with_sizes(what: str, text: str | None) -> tuple[tuple[str, int, str], ...]:
    """The placements of a DTensor as rows of (axis, size, placement), known or not.

    Raises:
        CaptureError: it is a plain tensor.
    """
    refuse_plain(what, text)
    axes = axes_of(current_scope().mesh)
    sizes = dict(zip(axes.names, axes.sizes, strict=True))
    return tuple((name, sizes[name], placement) for name, placement in parse_placed(text or ""))


@_compat.constant_in_graph
def placements_on_part(text: str | None) -> str:
    """The placements of a DTensor on a part of the mesh of the code here, else nothing."""
    mesh = current_scope().mesh
    if text is None or mesh is None:
        return ""
    names = tuple(name for name, _ in parse_placed(text))
    return text if names != axes_of(mesh).names else ""


@_compat.constant_in_graph
def replicated_text(what: str, text: str | None) -> str:
    """The text of placements that replicate over the axes of a DTensor."""
    refuse_stages(what, text)
    return print_placed([(name, "R") for name, _, _ in placements_with_sizes(what, text)])


@_compat.constant_in_graph
def refuse_plain(what: str, text: str | None) -> None:
    """Refuse a plain tensor where a DTensor is needed.

    Raises:
        CaptureError: it is a plain tensor.
    """
    if text is None:
        mesh = current_scope().mesh
        mesh = mesh if mesh is not None else current_mesh()
        if mesh is not None and not current_scope().manual:
            raise needs_ranks(what, mesh)
        fix = "DTensor.from_local(x, mesh, placements), or distribute_tensor"
        if current_scope().closes_over:
            fix = (
                "if the function closes over the DTensor and also reads it outside of "
                "shard_map, pass it as an argument of the function and of shard_map"
            )
        raise CaptureError.of(
            what, "the method is called on a plain tensor", needed="a DTensor", fix=fix
        )


@_compat.constant_in_graph
def refuse_partial(what: str, rows: tuple[Any, ...]) -> None:
    """Refuse Partial placements where torch does.

    Raises:
        PlacementError: naming the axes.
    """
    wrong = [name for name, _, placement in rows if placement[0] == "P"]
    if wrong:
        raise PlacementError.of(
            what,
            f"Partial over {', '.join(wrong)}",
            needed="Shard or Replicate",
            fix="DTensor.from_local(x, mesh, placements), where x is this rank's term of the sum",
        )


@_compat.constant_in_graph
def refuse_option(what: str, option: str, fix: str) -> None:
    """Refuse an option that has no meaning here.

    Raises:
        CaptureError: always.
    """
    raise CaptureError.of(what, option, fix=fix)
