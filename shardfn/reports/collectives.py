"""The collectives of a step by source line, module and mesh axis, with their bytes, their time, and
how to avoid them.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from ..buckets import BucketPlan
from ..inspect.step_time import StepTime
from ..inspect.timeline.events import BUBBLE, EXPOSED, Event
from ..patterns import general
from ..source_text import joined_paths, located_in_program, shape_of_path
from ..types import Collective
from .strings import Strings

SHOWN = 3  # paths in a text
PARAMETER = "parameter gather"
Key = tuple[Any, ...]  # what the collectives of a row, or events, have in common


@attrs.frozen
class Reason:
    """Why collectives are sent, and what spares them.

    Args:
        why: they are sent.
        instead: the placements with which they are not sent, or a constraint to try; empty if none
            is known.
        changes: all of those placements, the largest values first.
        saves: what the step lowered with the placements saves; empty for a constraint.
        seconds: that such a step takes less.
        is_asked: whether a placement asks for them, as that of a parameter which is gathered to
            be used.
        lines: where the members of buckets are read, or the values of collectives without a line
            are made, each with its share of the bytes.
    """

    why: str
    instead: str = ""
    changes: tuple[str, ...] = ()
    saves: str = ""
    seconds: float = 0.0
    is_asked: bool = False
    lines: Mapping[str, float] = attrs.field(default=types.MappingProxyType({}), hash=False)


@attrs.frozen
class SentByLine:
    """Equal collectives of one line, in equal modules.

    Args:
        kind: "all_reduce", "all_gather" and so on.
        op: the reduction; None where nothing is reduced.
        axis: the mesh axis.
        source: the line that needs them.
        module: the path of the submodule; of several layers with the range of their numbers.
        first_module: the path of the first of them.
        implicit: whether no placement asked for them.
        count: how many a step has.
        nbytes: the payload of all of them, of a rank.
        seconds: of all of them.
        exposed: the part of the seconds in which the rank waits for them.
        buckets: the numbers of their buckets.
        leaves: the arguments whose gradients the buckets carry.
    """

    kind: str
    op: str | None
    axis: str
    source: str | None
    module: str | None
    first_module: str | None
    implicit: bool
    count: int
    nbytes: int
    seconds: float
    exposed: float
    buckets: tuple[int, ...] = ()
    leaves: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """Where they come from, after a name: at module and line, or for what they carry."""
        line = located_in_program(self.source, self.module)
        return f" at {line}" if line else f" for {self.carries}" if self.leaves else ""

    @property
    def carries(self) -> str:
        """The arguments whose gradients they carry, as text."""
        paths = [*dict.fromkeys(map(general, self.leaves))]
        others = len(paths) - SHOWN
        more = [others_of(others)] if others > 0 else []
        return ", ".join([*paths[:SHOWN], *more])

    def __str__(self) -> str:
        times = f"{self.count} x " if self.count > 1 else ""
        op = f" {self.op}" if self.op else ""
        return f"{times}{self.kind}{op} over {self.axis}"


def others_of(n: int) -> str:
    """Return what stands for n items that a text leaves out."""
    return "1 other" if n == 1 else f"{n} others"


def sent_by_line(
    collectives: Sequence[Collective], times: Sequence[StepTime], plan: BucketPlan
) -> tuple[SentByLine, ...]:
    """Sum the collectives of each line, those that are waited for longest first.

    Args:
        collectives: of a step, those of loops as often as they run.
        times: of its programs.
        plan: the buckets of the step.
    """
    groups = collections.defaultdict[Key, list[Collective]](list)
    for x in collectives:
        groups[_key(x.kind, x), x.op, x.implicit].append(x)
    sent, waited = _seconds(times)
    bytes_of_key: collections.Counter[Key] = collections.Counter()
    for (key, *_), same in groups.items():
        bytes_of_key[key] += _nbytes(same)
    rows = []
    for (key, *_), same in groups.items():
        share = _nbytes(same) / (bytes_of_key[key] or 1)
        rows.append(_row(same, share * sent[key], share * waited[key], plan))
    return tuple(sorted(rows, key=lambda row: (-row.exposed, -row.seconds, -row.nbytes)))


def _key(kind: str, x: Collective | Event) -> Key:
    return kind, x.axis, x.source, shape_of_path(x.module)


def _nbytes(same: Sequence[Collective]) -> int:
    return sum(x.nbytes for x in same)


def _seconds(times: Sequence[StepTime]) -> tuple[dict[Key, float], dict[Key, float]]:
    """Return the seconds that the collectives of each line take, and those that a rank waits."""
    sent = collections.defaultdict[Key, float](float)
    waited = collections.defaultdict[Key, float](float)
    for time in times:
        run = time.ranks[time.coordinate].run
        for part, repeats in run.counts().items():
            for x in part.events:
                if x.axis is not None and x.track != BUBBLE:
                    of_key = waited if x.track == EXPOSED else sent
                    of_key[_key(x.name, x)] += repeats * x.seconds
    return sent, waited


def _row(
    same: Sequence[Collective], seconds: float, exposed: float, plan: BucketPlan
) -> SentByLine:
    first = same[0]
    modules = [x.module for x in same if x.module]
    buckets = sorted({x.bucket for x in same if x.bucket is not None})
    return SentByLine(
        first.kind,
        first.op,
        first.axis,
        first.source,
        joined_paths(modules) if modules else None,
        first.module,
        first.implicit,
        len(same),
        _nbytes(same),
        seconds,
        exposed,
        tuple(buckets),
        tuple(leaf for x in plan.buckets if x.index in buckets for leaf in x.leaves),
    )


def _asked(x: SentByLine, reason: Reason) -> str:
    """Return what asks for collectives."""
    if not x.implicit:
        return "a placement"
    return PARAMETER if reason.is_asked else "implicit"


def collective_rows(
    sent: Sequence[SentByLine], reasons: Mapping[SentByLine, Reason], strings: Strings
) -> list[dict[str, Any]]:
    """Return the rows of the page.

    Args:
        sent: the collectives of each line.
        reasons: why they are sent, and what spares them.
        strings: of the page.
    """
    rows = []
    for x in sent:
        reason = reasons.get(x, Reason(""))
        row = {
            "kind": strings.number(x.kind),
            "op": strings.number(x.op),
            "axis": strings.number(x.axis),
            "source": strings.number(x.source),
            "module": strings.number(x.module),
            "asked": strings.number(_asked(x, reason)),
            "lines": [[strings.number(line), share] for line, share in reason.lines.items()],
            "count": x.count,
            "nbytes": x.nbytes,
            "seconds": x.seconds,
            "exposed": x.exposed,
            "buckets": list(x.buckets),
            "carries": strings.number(x.carries),
            "why": strings.number(reason.why),
            "instead": [strings.number(x) for x in reason.changes or [reason.instead] if x],
            "saves": strings.number(reason.saves),
        }
        rows.append(row)
    return rows
