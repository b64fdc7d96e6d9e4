"""Flattened meshes inside the code of one rank: one axis that stands for several of the root mesh.

Dynamo runs these functions on constants, so errors reach the user unchanged.
"""

from __future__ import annotations

import itertools
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ... import _compat
from ...errors import CaptureError, PlacementError
from ...mesh import axes_of, ranks_of, real_mesh


def flattened(mesh: Any, *args: Any) -> Any:
    """Call `mesh._flatten`, which makes a mesh of one axis with the same ranks.

    Raises:
        CaptureError: torch refuses it.
    """
    try:
        with _compat.values():
            return real_mesh(mesh)._flatten(*args)
    except (RuntimeError, ValueError, TypeError) as error:
        raise CaptureError.of(
            "mesh._flatten",
            f"torch refuses to flatten the mesh: {str(error.args[0]).strip()}",
            fix="give the flattened mesh a name: mesh._flatten('name')",
        ) from error


@_compat.constant_in_graph
def flatten(mesh: Any, *args: Any) -> None:
    """Call `mesh._flatten` while Dynamo reads it.

    Raises:
        CaptureError: torch refuses it.
    """
    flattened(mesh, *args)


def home_of(mesh: Any) -> Any:
    """The mesh whose ranks run the code that names this mesh: the root of a slice, or the mesh
    itself.
    """
    root = _compat.root_mesh(mesh)
    is_slice = set(axes_of(mesh).names) <= set(axes_of(root).names)
    return root if is_slice else mesh


def refuse_flattened(what: str, mesh: Any, around: DeviceMesh) -> None:
    """Refuse DTensors on flattened axes where values are on the axes that these stand for.

    Raises:
        PlacementError: says how to write the placements.
    """
    is_root = around is _compat.root_mesh(around)
    if is_root and home_of(mesh) != around:  # an equal mesh may be another object
        axes = unflattened_axes(axes_of(mesh).names, around)
        raise PlacementError.of(
            what,
            f"the flattened mesh of the DTensor is {axes_of(mesh)}, but the code uses the mesh "
            f"{axes_of(around)}",
            needed="one mesh",
            fix=f"give a placement for each of {', '.join(axes)}, on the mesh with these axes",
            mesh=around,
        )


def unflattened_axes(names: tuple[str, ...], around: DeviceMesh) -> tuple[str, ...]:
    """The axis names, with the axes of the root mesh in place of flattened ones."""
    own = axes_of(around).names
    known = _compat.flattened_meshes(around)
    groups = [
        _axes(known[name], around) if name in known and name not in own else (name,)
        for name in names
    ]
    return tuple(itertools.chain.from_iterable(groups))


def axes_of_flattened_group(group: Any, around: DeviceMesh) -> tuple[str, ...] | None:
    """The axes of a mesh over which the group of a flattened one communicates, by the group or
    its name.
    """
    group = getattr(group, "group_name", group)
    for mesh in _compat.flattened_meshes(around).values():
        if mesh.get_group().group_name == group:
            return _axes(mesh, around)
    return None


def _axes(flat: Any, around: DeviceMesh) -> tuple[str, ...]:
    """The axes of a mesh that have the ranks of a flattened one, in its order."""
    names = axes_of(around).names
    ranks = ranks_of(flat)
    for count in range(1, len(names) + 1):
        for some in itertools.combinations(names, count):
            part = around if some == names else around[some]
            if ranks_of(part) == ranks:
                return some
    return axes_of(flat).names
