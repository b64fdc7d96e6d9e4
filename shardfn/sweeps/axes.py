"""The meshes of a sweep, given by the sizes of their axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import PlacementError
from ..types import MeshAxes

# names of axes in place of the user's, by their number
NAMES = {1: ("dp",), 2: ("dp", "tp"), 3: ("dp", "cp", "tp")}
MeshLike = tuple[int, ...] | Mapping[str, int]


def axes_of_meshes(
    where: str, meshes: Sequence[MeshLike], axis_names: Sequence[str] | None, pipeline: str | None
) -> list[MeshAxes]:
    """Return the axes of each mesh.

    Args:
        where: the function, for errors.
        meshes: their shapes, or the sizes of their axes by name.
        axis_names: of the user, for shapes.
        pipeline: the axis of the stages, where there are any: then the first by default.

    Raises:
        PlacementError: a shape has more axes than there are names.
    """
    names = NAMES if pipeline is None else {n: (pipeline, "dp", "tp")[:n] for n in (1, 2, 3)}
    every = []
    for mesh in meshes:
        if isinstance(mesh, Mapping):
            every.append(MeshAxes(tuple(mesh), tuple(mesh.values())))
        else:
            own = tuple(axis_names or names.get(len(mesh), ()))
            every.append(_axes(where, tuple(mesh), own))
    return every


def _axes(where: str, shape: tuple[int, ...], names: tuple[str, ...]) -> MeshAxes:
    """Return the axes of one shape.

    Raises:
        PlacementError: there are not as many names.
    """
    if len(names) < len(shape):
        raise PlacementError.of(
            f"{where}, axis_names",
            f"axis_names has {len(names)} names, but the mesh has shape {shape}",
            fix=f"axis_names with {len(shape)} names",
            arg_path="axis_names",
        )
    return MeshAxes(names[: len(shape)], shape)
