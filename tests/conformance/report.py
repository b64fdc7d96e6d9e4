"""What was found, for people: a line while it runs, totals, and docs/logs/conformance.md."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import attrs

from conformance.judge import ABSENT, CRASHED, GATHERED, NATIVE, REFUSED, VERDICTS, WRONG
from conformance.workers import Found

BAD = (WRONG, CRASHED)
RANDOM, DRAWS = (
    "random",
    "draws random numbers",
)  # a verdict of its own: refused until random numbers have their law


@attrs.frozen
class Row:
    """One operator: its verdict, its cases by theirs, and the first words about those that did
    not run.
    """

    name: str
    verdict: str
    counts: dict[str, int]
    said: str


def row(found: Found) -> Row:
    """The verdict on an operator.

    The worst case decides, except that an operator is refused only where no case of its value
    runs; it is native if some case with a cut input is, of its value and of its gradient where
    it has one.
    """
    counts = collections.Counter(v.what for v in found.verdicts)
    of = {what: {v.what for v in found.verdicts if v.of == what} for what in ("value", "gradient")}
    if of["value"] <= {ABSENT}:  # or nothing: no sample in a dtype of the CPU
        verdict = ABSENT
    elif counts[WRONG] or counts[CRASHED]:
        verdict = WRONG if counts[WRONG] else CRASHED
    elif of["value"] <= {REFUSED, ABSENT}:
        verdict = (
            RANDOM if all(DRAWS in v.said for v in found.verdicts if v.what == REFUSED) else REFUSED
        )
    else:
        verdict = NATIVE if all(NATIVE in seen for seen in of.values() if seen) else GATHERED
    worst = max(
        (v for v in found.verdicts if v.said), key=lambda v: VERDICTS.index(v.what), default=None
    )
    return Row(found.name, verdict, dict(counts), worst.said if worst else "")


def line(found: Found) -> str:
    """One operator on one line, and what is bad about it on more."""
    mine = row(found)
    counted = ", ".join(f"{mine.counts[v]} {v}" for v in VERDICTS if v in mine.counts)
    out = f"{mine.name:<48} {mine.verdict:<9} {found.seconds:6.1f} s  {counted}"
    bad = [v for v in found.verdicts if v.what in BAD][:2]
    return "\n".join(
        [out, *(f"          {v.what}: {v.case[:300]}\n            {v.said[:600]}" for v in bad)]
    )


def totals(rows: Sequence[Row]) -> str:
    """How many operators have each verdict, and how many cases."""
    of = collections.Counter(r.verdict for r in rows)
    cases = collections.Counter({v: sum(r.counts.get(v, 0) for r in rows) for v in VERDICTS})
    lines = [f"{'':<10}{'operators':>10}{'cases':>10}"]
    lines += [f"{v:<10}{of[v]:>10}{cases[v]:>10}" for v in (*VERDICTS, RANDOM) if of[v] or cases[v]]
    return "\n".join([*lines, f"{'total':<10}{len(rows):>10}{sum(cases.values()):>10}"])


def page(rows: Sequence[Row]) -> str:
    """docs/logs/conformance.md."""
    head = f"""# Log: every operator, sharded

`make conformance` writes this page. What it means: [every operator, sharded](../conformance.md).

```
{totals(rows)}
```
"""
    parts = [head]
    for verdict in (WRONG, CRASHED, REFUSED, RANDOM, ABSENT, GATHERED, NATIVE):
        mine = [r for r in rows if r.verdict == verdict]
        if mine:
            parts.append(
                f"## {verdict.capitalize()}: {len(mine)}\n\n" + "\n".join(map(_said, mine)) + "\n"
            )
    return "\n".join(parts)


def _said(row: Row) -> str:
    counted = ", ".join(f"{row.counts[v]} {v}" for v in VERDICTS if v in row.counts)
    lines = [text for text in row.said.splitlines() if not text.strip().startswith("at: ")]
    reason = " ".join(" ".join(lines).split())
    return f"- `{row.name}`: {counted}" + (f". {reason[:300]}" if reason else "")
