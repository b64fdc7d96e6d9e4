"""The `attention` option: the way in which attention is sharded over each mesh axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from .errors import PlacementError
from .patterns import near
from .types import ATTENTION, AxisOption, MeshAxes

GATHER, RING, ULYSSES = "gather", "ring", "ulysses"
WAYS = (GATHER, RING, ULYSSES)
NEEDED = f"a dict of mesh axes, each with {' or '.join(map(repr, WAYS))}"


def check_attention(name: str, attention: Any) -> None:
    """Check that an option names ways of attention.

    Raises:
        PlacementError: it does not.
    """
    if attention is None:
        return
    is_table = isinstance(attention, Mapping) and all(isinstance(x, str) for x in attention)
    if not is_table:
        raise _refused(name, f"attention is {attention!r}", "attention={'cp': 'ring'}")
    for axis, way in attention.items():
        if not isinstance(way, str) or way not in WAYS:
            fix = near(str(way), WAYS)[0]
            raise _refused(
                name, f"attention[{axis!r}] is {way!r}", f"attention={{{axis!r}: {fix!r}}}"
            )


def with_attention(name: str, axes: MeshAxes, attention: Mapping[str, str] | None) -> MeshAxes:
    """Return the axes of a mesh, with the ways of attention over them.

    Raises:
        PlacementError: the mesh lacks one of the axes.
    """
    if not attention:
        return axes
    for axis, way in attention.items():
        if axis not in axes.names:
            fix = near(axis, axes.names)[0] if axes.names else "cp"
            got = f"attention names the axis {axis!r}, and the mesh has {', '.join(axes.names)}"
            raise _refused(name, got, f"attention={{{fix!r}: {way!r}}}")
    ways = [AxisOption(ATTENTION, *row) for row in sorted(attention.items())]
    return attrs.evolve(axes, options=(*axes.options, *ways))


def _refused(name: str, got: str, fix: str) -> PlacementError:
    """Make the error for a bad option."""
    return PlacementError.of(
        f"{name}, attention", got, needed=NEEDED, fix=fix, arg_path="attention"
    )
