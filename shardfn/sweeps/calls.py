"""The Python code that runs the step of one row of a sweep."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..pipelines import Schedule, schedules
from ..types import MeshAxes

IMPORTED = ("P", "Stage", "zigzag")  # names in the text of placements
MAKERS = ("gpipe", "one_f_one_b", "zero_bubble", "zbv", "dualpipev")


def call_text(
    name: str,
    axes: MeshAxes,
    options: Mapping[str, Any],
    placements: str,
    of_shard: Mapping[str, Any],
) -> str:
    """Return lines that define `run`, the step sharded over a mesh.

    Args:
        name: of the step.
        axes: of the mesh.
        options: of the step, by keyword.
        placements: of its arguments, as text.
        of_shard: keywords of `shard`.
    """
    step = name if name.isidentifier() else "step"
    texts = [f"{key}={_text(x)}" for key, x in options.items()]
    names = [x for x in IMPORTED if re.search(rf"\b{x}\(", placements)]
    lines = ["import functools"] if texts else []
    lines += [f"from shardfn import {', '.join(names)}"] if names else []
    lines.append(f"mesh = sf.make_mesh({axes.sizes!r}, {axes.names!r})")
    lines.append(f"placements = {placements}")
    bound = f"functools.partial({', '.join([step, *texts])})" if texts else step
    others = "".join(f", {key}={x!r}" for key, x in of_shard.items())
    lines.append(f"run = sf.shard({bound}, mesh, placements{others})")
    return "\n".join(lines)


def _text(x: Any) -> str:
    """Return the text of an option of the step."""
    return schedule_text(x) if isinstance(x, Schedule) else repr(x)


def schedule_text(x: Schedule) -> str:
    """Return a call that makes a schedule: by its name, or by its table.

    Example:
        >>> schedule_text(schedules.gpipe(2, 4))
        'sf.schedules.gpipe(2, 4)'
    """
    sizes = f"{x.coordinates}, {x.microbatches}"
    chunks = x.stages // x.coordinates
    if x.name in MAKERS and x == getattr(schedules, x.name)(x.coordinates, x.microbatches):
        return f"sf.schedules.{x.name}({sizes})"
    if x.name == "interleaved" and x == schedules.interleaved(
        x.coordinates, x.microbatches, chunks=chunks
    ):
        return f"sf.schedules.interleaved({sizes}, chunks={chunks})"
    return f"sf.Schedule({x.name!r}, {[[*map(tuple, row)] for row in x.table]!r})"
