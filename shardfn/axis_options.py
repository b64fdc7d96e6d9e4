"""Checks of the options that name mesh axes: `attention`, the method of sharded attention, and
`rows`, the rows that a rank can receive for its experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from .errors import PlacementError
from .patterns import near
from .row_bounds import row_bound
from .types import ATTENTION, ROWS, AxisOption, MeshAxes

GATHER, RING, ULYSSES = "gather", "ring", "ulysses"
WAYS = (GATHER, RING, ULYSSES)


@attrs.frozen
class _Option:
    """What the values of an option may be.

    Args:
        is_value: whether a value is one of them.
        needed: the same in words.
        example: an axis and a value that can be pasted.
        values: those that a misspelt one may mean.
    """

    is_value: Callable[[Any], bool]
    needed: str
    example: tuple[str, str]
    values: tuple[str, ...] = ()


OPTIONS = {
    ATTENTION: _Option(
        lambda value: isinstance(value, str) and value in WAYS,
        " or ".join(map(repr, WAYS)),
        ("cp", RING),
        WAYS,
    ),
    ROWS: _Option(
        lambda value: row_bound(value, 1) > 0,
        'a number of rows, 1 or more, or text such as "1.5x", a multiple of the mean number '
        "of rows",
        ("ep", "1.5x"),
    ),
}


def check_option(name: str, option: str, table: Any) -> None:
    """Check that an option is a dict of mesh axes with values that it may have.

    Args:
        name: of the function, for errors.
        option: a name in `OPTIONS`.
        table: as the user wrote it.

    Raises:
        PlacementError: it is not.
    """
    if table is None:
        return
    row = OPTIONS[option]
    if not isinstance(table, Mapping) or not all(isinstance(axis, str) for axis in table):
        raise _refused(name, option, f"{option} is {table!r}", *row.example)
    for axis, value in table.items():
        if not row.is_value(value):
            fix = near(str(value), row.values)[0] if row.values else row.example[1]
            raise _refused(name, option, f"{option}[{axis!r}] is {value!r}", axis, fix)


def with_options(name: str, axes: MeshAxes, tables: Mapping[str, Any]) -> MeshAxes:
    """Return the axes of a mesh with options for them.

    Args:
        name: of the function, for errors.
        axes: of the mesh.
        tables: for each option, its values by axis; None where it is not set.

    Raises:
        PlacementError: the mesh lacks one of the axes.
    """
    found: list[AxisOption] = []
    for option, table in tables.items():
        for axis, value in sorted((table or {}).items()):
            if axis not in axes.names:
                fix = near(axis, axes.names)[0] if axes.names else axis
                has = f"and the mesh has {', '.join(axes.names) or 'no axes'}"
                got = f"{option} names the axis {axis!r}, {has}"
                raise _refused(name, option, got, fix, value)
            found.append(AxisOption(option, axis, value))
    return attrs.evolve(axes, options=tuple(found)) if found else axes


def _refused(name: str, option: str, got: str, axis: str, value: Any) -> PlacementError:
    """Make the error for a bad option, with one that can be pasted."""
    return PlacementError.of(
        f"{name}, {option}",
        got,
        needed=f"a dict of mesh axes, each with {OPTIONS[option].needed}",
        fix=f"{option}={{{axis!r}: {value!r}}}",
        arg_path=option,
    )
