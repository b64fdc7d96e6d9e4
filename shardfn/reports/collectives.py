"""The collectives of a step by line, module and axis: their bytes, their time, and what spares
them.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from ..source_text import joined_paths, shape_of_path
from ..types import Collective
from .strings import Strings

Key = tuple[Any, ...]  # of the collectives of a row


@attrs.frozen
class SentByLine:
    """Equal collectives of one line, in equal modules.

    Args:
        kind: "all_reduce", "all_gather" and so on.
        op: the reduction; None where nothing is reduced.
        axis: the mesh axis.
        source: the line that needs them.
        module: the path of the submodule; of several layers with the range of their numbers.
        implicit: whether no placement asked for them.
        count: how many a step has.
        nbytes: the payload of all of them, of a rank.
        seconds: of all of them.
        buckets: the numbers of their buckets.
    """

    kind: str
    op: str | None
    axis: str
    source: str | None
    module: str | None
    implicit: bool
    count: int
    nbytes: int
    seconds: float
    buckets: tuple[int, ...] = ()


def sent_by_line(
    collectives: Sequence[Collective], seconds_of: Callable[[Collective], float]
) -> tuple[SentByLine, ...]:
    """Sum the collectives of each line, those that take longest first.

    Args:
        collectives: of a step, those of loops as often as they run.
        seconds_of: returns the seconds of one.
    """
    groups = collections.defaultdict[Key, list[Collective]](list)
    for x in collectives:
        key = x.kind, x.op, x.axis, x.source, shape_of_path(x.module), x.implicit
        groups[key].append(x)
    rows = [_row(same, seconds_of) for same in groups.values()]
    return tuple(sorted(rows, key=lambda row: (-row.seconds, -row.nbytes)))


def _row(same: Sequence[Collective], seconds_of: Callable[[Collective], float]) -> SentByLine:
    first = same[0]
    modules = [x.module for x in same if x.module]
    buckets = sorted({x.bucket for x in same if x.bucket is not None})
    return SentByLine(
        first.kind,
        first.op,
        first.axis,
        first.source,
        joined_paths(modules) if modules else None,
        first.implicit,
        len(same),
        sum(x.nbytes for x in same),
        sum(map(seconds_of, same)),
        tuple(buckets),
    )


def collective_rows(sent: Sequence[SentByLine], strings: Strings) -> list[dict[str, Any]]:
    """Return the rows of the page.

    Args:
        sent: the collectives of each line.
        strings: of the page.
    """
    return [
        {
            "kind": strings.number(x.kind),
            "op": strings.number(x.op),
            "axis": strings.number(x.axis),
            "source": strings.number(x.source),
            "module": strings.number(x.module),
            "implicit": x.implicit,
            "count": x.count,
            "nbytes": x.nbytes,
            "seconds": x.seconds,
            "buckets": list(x.buckets),
        }
        for x in sent
    ]
