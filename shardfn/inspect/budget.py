"""`Explanation`: the collectives of one rank's program as a table, and its differences from a
budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import attrs

from ..buckets import BucketPlan
from ..byte_sizes import human_bytes
from ..collectives import COLLECTIVES
from ..extensions import page_of
from ..source_text import located
from ..types import Collective, LocalProgram

COLLECTIVE_KINDS = tuple(COLLECTIVES)  # the names of all kinds
LARGEST = 3  # collectives that a message about bytes names
PUBLIC_READERS = {  # of a value that is not an op's
    "output": "result",
    "prim_align": "gradient",
    "prim_redistribute": "constrain",
}


@attrs.frozen(repr=False)
class Explanation:
    """The collectives of one rank's program, printed as a table in the order in which they start.

    A collective in the body of a scan is listed once, with the number of times that the collective
    runs.

    Args:
        name: the name of the transformed function.
        mesh: the mesh, as text.
        collectives: the collectives of one rank.
        elided: the number of collectives over mesh axes of size 1, which are removed from the
            program.
        buckets: the bucket plan as text, which is empty if the program has no buckets.

    Example:
        >>> import torch, shardfn as sf
        >>> with sf.fake_world(2):
        ...     mesh = sf.make_mesh((2,), ("dp",))
        ...     explanation = sf.explain(sf.shard(torch.mean, mesh, sf.P("dp")), torch.ones(4))
        >>> explanation.nbytes, [collective.kind for collective in explanation.collectives]
        (4, ['all_reduce'])
    """

    name: str
    mesh: str
    collectives: tuple[Collective, ...]
    elided: int = 0
    buckets: str = ""

    @property
    def nbytes(self) -> int:
        """Return the total bytes of all collectives of a rank."""
        return sum(c.nbytes for c in self.collectives)

    @property
    def implicit(self) -> tuple[Collective, ...]:
        """Return the implicit collectives, which no placement asked for."""
        return tuple(c for c in self.collectives if c.implicit)

    def _repr_html_(self) -> str | None:
        """Draw a picture in a notebook."""
        return page_of(self)

    def __str__(self) -> str:
        count = len(self.collectives)
        noun = "collective" if count == 1 else "collectives"
        total = human_bytes(self.nbytes)
        head = f"{self.name} on mesh {self.mesh}: {count} {noun}, {total} a rank"
        lines = [head, *_table(self.collectives), *_totals(self.collectives)]
        if self.elided:
            lines.append(f"  {self.elided} collectives over axes of one rank were removed")
        return "\n".join([*lines, *([self.buckets] if self.buckets else [])])

    __repr__ = __str__


def explanation(programs: Sequence[LocalProgram], plan: BucketPlan) -> Explanation:
    """List the collectives of the programs of one rank, which run one after the other.

    Args:
        programs: the forward, and the backward where autograd follows the call.
        plan: the bucket plan.
    """
    first = programs[0]
    return Explanation(
        name=first.name,
        mesh=str(first.axes),
        collectives=tuple(c for program in programs for c in program.collectives),
        elided=sum(len(program.elided) for program in programs),
        buckets=str(plan) if plan.buckets else "",
    )


def _table(collectives: Sequence[Collective]) -> list[str]:
    """Return the lines of the table: one row for each collective, and its count in a scan."""
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
            located(**c.origin),
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
    """Return the op that needs a collective: the name of its node, without the number."""
    base = c.name.rstrip("0123456789").rstrip("_")
    return PUBLIC_READERS.get(base, c.name)


def _totals(collectives: Sequence[Collective]) -> list[str]:
    """Return one line for each kind of collective over each axis: count and bytes."""
    groups: dict[tuple[str, str], list[int]] = {}
    for c in collectives:
        groups.setdefault((c.kind, c.axis), []).append(c.nbytes)
    return [
        f"  {len(sizes)} {kind} over {axis}: {human_bytes(sum(sizes))}"
        for (kind, axis), sizes in sorted(groups.items())
    ]


def over_budget(
    program: Explanation,
    counts: Mapping[str, int],
    *,
    most_bytes: int | None,
    most_implicit: int | None,
) -> list[str]:
    """Compare a program's collectives with a budget: return one line for each difference.

    Args:
        program: the program.
        counts: the number of collectives of some kinds. The others are free.
        most_bytes: the most bytes of all payloads of a rank; None for any.
        most_implicit: the most collectives that no placement asked for; None for any.
    """
    differences = [
        f"{len(of_kind)} {kind}, and {wanted} in the budget{_places(of_kind)}"
        for kind, wanted in counts.items()
        if len(of_kind := [c for c in program.collectives if c.kind == kind]) != wanted
    ]
    if most_bytes is not None and program.nbytes > most_bytes:
        total, most = human_bytes(program.nbytes), human_bytes(most_bytes)
        largest = sorted(program.collectives, key=lambda c: -c.nbytes)[:LARGEST]
        places = _places(largest, is_mixed=True)
        differences.append(f"a rank sends {total}, but the budget allows {most}{places}")
    implicit = program.implicit
    if most_implicit is not None and len(implicit) > most_implicit:
        noun = "implicit collectives, and at most"
        places = _places(implicit, is_mixed=True)
        differences.append(f"{len(implicit)} {noun} {most_implicit} in the budget{places}")
    return differences


def _places(collectives: Iterable[Collective], *, is_mixed: bool = False) -> str:
    """Return the reader, axis, bytes and source line of each collective, as the end of
    a message; and its kind, if they are of several.
    """
    places = [
        f"{c.kind} " * is_mixed
        + f"for {_reader(c)} over {c.axis}, {human_bytes(c.nbytes)}"
        + (f", at {located(**c.origin)}" if c.source else "")
        for c in collectives
    ]
    return f": {'; '.join(places)}" if places else ""
