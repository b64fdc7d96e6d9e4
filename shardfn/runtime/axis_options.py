"""Options of a transformed function that name mesh axes: how many rows a rank can take."""

from __future__ import annotations

from typing import Any

import attrs

from ..errors import PlacementError
from ..row_bounds import row_bound
from ..types import ROWS, AxisOption, MeshAxes


def check_rows(request: Any, _: Any, rows: Any) -> None:
    """Check `rows=`: a dict from mesh axes to bounds.

    Raises:
        PlacementError: it is none, or a bound is below one row.
    """
    fix = 'rows={"ep": "1.5x"}'
    where = f"{request.name}, rows"
    if rows is None:
        return
    if not isinstance(rows, dict) or not all(isinstance(axis, str) for axis in rows):
        raise PlacementError.of(
            where, f"got {rows!r}", needed="a dict from mesh axes to bounds", fix=fix
        )
    for axis, bound in rows.items():
        if not row_bound(bound, 1):
            raise PlacementError.of(
                f"{where}[{axis!r}]",
                f"got {bound!r}",
                needed='a number of rows, 1 or more, or a text such as "1.5x", of their mean',
                fix=fix,
            )


def with_options(name: str, axes: MeshAxes, rows: dict[str, Any] | None) -> MeshAxes:
    """Return a mesh with the options for its axes.

    Raises:
        PlacementError: an option names no axis of the mesh.
    """
    if not rows:
        return axes
    unknown = [axis for axis in rows if axis not in axes.names]
    if unknown:
        raise PlacementError.of(
            f"{name}, rows[{unknown[0]!r}]",
            f"the mesh {axes} has no axis {unknown[0]!r}",
            needed=f"one of {', '.join(axes.names) or 'no axes'}",
            fix=f"rows={{{axes.names[0]!r}: ...}}" if axes.names else "a mesh",
        )
    return attrs.evolve(axes, options=tuple(AxisOption(ROWS, *row) for row in rows.items()))
