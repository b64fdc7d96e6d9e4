"""Options of a transformed function that name mesh axes: how many rows a rank can take, and how
attention is sharded.
"""

from __future__ import annotations

from typing import Any

import attrs

from ..attention_ways import with_attention
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


def with_options(request: Any, axes: MeshAxes) -> MeshAxes:
    """Return a mesh with the options that a request has for its axes.

    Raises:
        PlacementError: an option names no axis of the mesh.
    """
    name, rows = request.name, request.rows or {}
    for axis in rows:
        if axis not in axes.names:
            raise PlacementError.of(
                f"{name}, rows[{axis!r}]",
                f"the mesh {axes} has no axis {axis!r}",
                needed=f"one of {', '.join(axes.names) or 'no axes'}",
                fix=f"rows={{{axes.names[0]!r}: ...}}" if axes.names else "a mesh",
            )
    bounds = [AxisOption(ROWS, *row) for row in sorted(rows.items())]
    axes = attrs.evolve(axes, options=(*axes.options, *bounds))
    return with_attention(name, axes, request.attention)
