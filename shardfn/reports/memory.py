"""Memory over a step, and the tensors that are alive at the peak, by module and source line."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import attrs

from ..inspect.memory import KINDS, Allocation, Memory, Moment
from ..patterns import general
from ..source_text import joined_paths, shape_of_path
from .parts import parts_of
from .strings import Strings

MOST_MOMENTS = 600  # of the chart
MOST_ROWS = 400  # tensors at the peak
Key = tuple[Any, ...]


def memory_rows(memory: Memory, strings: Strings) -> dict[str, Any]:
    """Return the memory of a step: its course, and the tensors at the peak.

    Args:
        memory: of one rank's program.
        strings: of the page.
    """
    moments = memory.moments()
    parts = parts_of([x.phase for x in moments])
    moments = [attrs.evolve(x, phase=part) for x, part in zip(moments, parts, strict=True)]
    alive = _grouped(memory.alive)
    return {
        "kinds": list(KINDS),
        "peak": memory.peak,
        "at": strings.number(memory.at),
        "module": strings.number(memory.module),
        "ops": len(moments),
        "moments": [
            [strings.number(x.source), strings.number(x.phase), *x.sizes] for x in _fewer(moments)
        ],
        "alive": [_row(tensors, strings) for tensors in alive[:MOST_ROWS]],
        "left_out": _bytes(x for row in alive[MOST_ROWS:] for x in row),
        "left_out_rows": max(0, len(alive) - MOST_ROWS),
    }


def _fewer(moments: Sequence[Moment]) -> list[Moment]:
    """Choose at most so many moments: of each part of the step the one that holds most."""
    step = -(-len(moments) // MOST_MOMENTS) or 1
    parts = [moments[k : k + step] for k in range(0, len(moments), step)]
    return [max(part, key=lambda moment: moment.nbytes) for part in parts]


def _grouped(alive: Sequence[Allocation]) -> list[list[Allocation]]:
    """Group equal tensors of equal layers, the largest groups first."""
    groups = collections.defaultdict[Key, list[Allocation]](list)
    for x in alive:
        key = x.kind, general(x.name), x.shape, x.dtype, x.source, shape_of_path(x.module)
        groups[key].append(x)
    return sorted(groups.values(), key=lambda row: -_bytes(row))


def _bytes(tensors: Any) -> int:
    return sum(x.nbytes for x in tensors)


def _row(tensors: Sequence[Allocation], strings: Strings) -> dict[str, Any]:
    """Return the row of equal tensors."""
    first = tensors[0]
    modules = [x.module for x in tensors if x.module]
    return {
        "kind": KINDS.index(first.kind),
        "name": strings.number(general(first.name) if len(tensors) > 1 else first.name),
        "shape": list(first.shape),
        "dtype": strings.number(str(first.dtype).removeprefix("torch.")),
        "source": strings.number(first.source),
        "module": strings.number(joined_paths(modules) if modules else None),
        "count": len(tensors),
        "nbytes": _bytes(tensors),
    }
