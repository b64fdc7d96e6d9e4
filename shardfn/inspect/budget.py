"""The communication of one rank's program, as a table and against a budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import attrs

from ..byte_sizes import human_bytes
from ..collectives import COLLECTIVES
from ..types import Collective

KINDS = tuple(COLLECTIVES)  # the names of all kinds
READERS = {  # of a value that is not an op's
    "output": "result",
    "prim_align": "gradient",
    "prim_redistribute": "constrain",
}


@attrs.frozen(repr=False)
class Explanation:
    """The collectives of one rank's program, in the order in which they start, as a table, in
    which those of a scan stand once.

    Args:
        name: of the transformed function.
        mesh: as text.
        collectives: of one rank.
        elided: the number of collectives over axes of one rank, which are removed.
        buckets: the bucket plan as text; empty where nothing is bucketed.
    """

    name: str
    mesh: str
    collectives: tuple[Collective, ...]
    elided: int = 0
    buckets: str = ""

    @property
    def nbytes(self) -> int:
        """The bytes of all payloads of a rank."""
        return sum(c.nbytes for c in self.collectives)

    @property
    def implicit(self) -> tuple[Collective, ...]:
        """The collectives that no placement asked for."""
        return tuple(c for c in self.collectives if c.implicit)

    def __str__(self) -> str:
        count = len(self.collectives)
        noun = "collective" if count == 1 else "collectives"
        total = human_bytes(self.nbytes)
        head = f"{self.name} on mesh {self.mesh}: {count} {noun}, {total} a rank"
        lines = [head, *_table(self.collectives), *_totals(self.collectives)]
        if self.elided:
            lines.append(f"  {self.elided} over axes of one rank were removed")
        return "\n".join([*lines, *([self.buckets] if self.buckets else [])])

    __repr__ = __str__


def _table(collectives: Sequence[Collective]) -> list[str]:
    rows = [("bytes", "collective", "for", "bucket", "asked by", "at")]
    times = Counter(map(id, collectives))  # those of a scan are the same record in each step
    once = {id(c): c for c in collectives}.values()
    rows += [
        (
            f"{times[id(c)]} x {human_bytes(c.nbytes)}"
            if times[id(c)] > 1
            else human_bytes(c.nbytes),
            f"{c.kind}[{', '.join(filter(None, (c.op, c.axis)))}]",
            _reader(c),
            "" if c.bucket is None else str(c.bucket),
            "nothing: implicit" if c.implicit else "a placement",
            c.source or "",
        )
        for c in once
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        cells = [x.ljust(n) for x, n in zip(others, widths[1:], strict=True)]
        lines.append(f"  {first.rjust(widths[0])}  {'  '.join(cells)}".rstrip())
    return lines if collectives else []


def _reader(c: Collective) -> str:
    """The op that needs a collective: the name of a node, without its number."""
    base = c.name.rstrip("0123456789").rstrip("_")
    return READERS.get(base, c.name)


def _totals(collectives: Sequence[Collective]) -> list[str]:
    """A line for each kind over each axis."""
    groups: dict[tuple[str, str], list[int]] = {}
    for c in collectives:
        groups.setdefault((c.kind, c.axis), []).append(c.nbytes)
    return [
        f"  {len(sizes)} {kind} over {axis}: {human_bytes(sum(sizes))}"
        for (kind, axis), sizes in sorted(groups.items())
    ]


def over_budget(
    found: Explanation,
    counts: Mapping[str, int],
    *,
    most_bytes: int | None,
    most_implicit: int | None,
) -> list[str]:
    """How a program differs from a budget, a line for each difference.

    Args:
        found: the program.
        counts: the number of collectives of some kinds. The others are free.
        most_bytes: the most bytes of all payloads of a rank; None for any.
        most_implicit: the most collectives that no placement asked for; None for any.
    """
    wrong = [
        f"{len(of_kind)} {kind}, and {wanted} in the budget{_places(of_kind)}"
        for kind, wanted in counts.items()
        if len(of_kind := [c for c in found.collectives if c.kind == kind]) != wanted
    ]
    if most_bytes is not None and found.nbytes > most_bytes:
        total, most = human_bytes(found.nbytes), human_bytes(most_bytes)
        wrong.append(f"{total} a rank, and at most {most} in the budget")
    implicit = found.implicit
    if most_implicit is not None and len(implicit) > most_implicit:
        what = "implicit collectives, and at most"
        places = _places(implicit)
        wrong.append(f"{len(implicit)} {what} {most_implicit} in the budget{places}")
    return wrong


def _places(collectives: Iterable[Collective]) -> str:
    places = [
        f"for {_reader(c)} over {c.axis}, {human_bytes(c.nbytes)}"
        + (f", at {c.source}" if c.source else "")
        for c in collectives
    ]
    return f": {'; '.join(places)}" if places else ""
