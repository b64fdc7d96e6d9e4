"""The marks that `constrain` and a gradient's parameter ask for."""

from __future__ import annotations

from collections.abc import Sequence

from ...placements import P, check_axes
from ...types import PENDING, Mark, Marks, MeshAxes
from .. import layout


def constrained(
    text: str, axes: MeshAxes, shape: Sequence[int], current: Marks
) -> Marks:
    """The marks that a constraint's text asks for; dims that say `*` keep their cut."""
    if not axes.names:
        return ()
    entries = text.split(";")
    unknown = {name for entry in entries for name in entry.split(",")} - {
        *axes.names,
        "",
        "*",
    }
    if unknown:
        raise ValueError(
            f"no axis {', '.join(sorted(unknown))}; the mesh has {axes}"
        )
    if [e for e in entries if e] and len(entries) > max(len(shape), 1):
        raise ValueError(
            f"a placement of {len(entries)} dims for a tensor of {len(shape)}, shape {tuple(shape)}"
        )
    check_axes(
        P(
            *[
                tuple(name for name in entry.split(",") if name not in ("", "*"))
                for entry in entries
            ]
        ),
        axes.names,
    )
    marks: list[Mark] = ["R"] * len(axes.names)
    said = {name for entry in entries for name in entry.split(",")}
    for dim, entry in enumerate(entries):
        for k, name in enumerate(axes.names):
            if name in entry.split(",") or (
                entry == "*"
                and name not in said
                and layout.split(current[k]) == (dim, 1)
            ):
                marks[k] = dim
    return layout.canonical(shape, marks, axes.sizes)


def aligned(
    shape: Sequence[int], like: Sequence[int], wanted: Marks, axes: MeshAxes
) -> Marks:
    """The marks of `like` where its dims have the same size; replicated elsewhere."""
    plain = [m if isinstance(m, str) else layout.split(m)[0] for m in wanted]
    marks = [
        "R"
        if m in PENDING or (not isinstance(m, str) and shape[m] != like[m])
        else m
        for m in plain
    ]
    return layout.canonical(shape, marks, axes.sizes)
