"""The collectives of a step: the bytes of each, by line, in the order of their start."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from ..byte_sizes import human_bytes
from ..inspect.budget import Explanation
from ..source_text import located_in_program
from ..types import Collective
from .bars import IMPLICIT, Bar, bars, keys
from .sheet import OF_AXES, Panel, Sheet


def collectives(x: Explanation) -> Sheet:
    """Lay out the picture of an explanation."""
    count = len(x.collectives)
    noun = "collective" if count == 1 else "collectives"
    lines = [
        f"{x.name}: {count} {noun}, {human_bytes(x.nbytes)} a rank",
        f"mesh {x.mesh}; collectives in the order of their start",
    ]
    notes = [f"{x.elided} collectives over axes of one rank were removed."] if x.elided else []
    return Sheet(lines, panels_of(x.collectives), notes)


def panels_of(sent: Sequence[Collective], title: str = "", most: int = 14) -> list[Panel]:
    """Draw the bytes of collectives: a bar for those of one kind, axis, reader and line."""
    if not sent:
        return []
    colours = colours_of(c.axis for c in sent)
    rows: dict[tuple[Any, ...], list[Collective]] = {}
    for c in sent:
        key = c.kind, c.op, c.axis, c.source, c.module, c.implicit
        rows.setdefault(key, []).append(c)
    drawn = [_bar(same, colours) for same in rows.values()]
    used: list[tuple[str, str, str | None]] = [
        (colour, f"over {axis}", None) for axis, colour in colours.items()
    ]
    if any(c.implicit for c in sent):
        used.append(("none", "implicit: not requested by a placement", IMPLICIT))
    return [bars(drawn, title, most), keys(used)]


def _bar(same: Sequence[Collective], colours: dict[str, str]) -> Bar:
    """Return the bar of equal collectives of one line."""
    first = same[0]
    nbytes = sum(c.nbytes for c in same)
    times = f"{len(same)} × " if len(same) > 1 else ""
    kind = f"{first.op} " if first.op else ""
    name = f"{times}{first.kind} {kind}over {first.axis}"
    hatch = IMPLICIT if first.implicit else None
    return Bar(
        name,
        nbytes,
        human_bytes(nbytes),
        colours[first.axis],
        located_in_program(first.source, first.module),
        hatch,
    )


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """Give a colour to each axis, or to each of other names, in alphabetical order."""
    return dict(zip(sorted({*names}), itertools.cycle(OF_AXES), strict=False))
