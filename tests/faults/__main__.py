"""`make faults`: each fault of the table, and its outcome, in docs/logs/faults.md.

ARGS="kill save" runs the rows that contain these words, and writes nothing.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from tests.faults.injected import Outcome, injected
from tests.faults.table import FAULTS

PAGE = Path(__file__).parents[2] / "docs" / "logs" / "faults.md"
HEAD = "| fault | when | ranks | timeout | on the others | seconds |\n|---|---|---|---|---|---|\n"
GOOD = ("named", "right")


def main(words: list[str]) -> int:
    """Run the faults. Returns how many were not told by name."""
    rows = [
        fault
        for fault in FAULTS
        if all(word in f"{fault.what} {fault.when} {fault.size}" for word in words)
    ]
    outcomes = []
    for k, fault in enumerate(rows):
        outcome = injected(fault)
        outcomes.append(outcome)
        print(f"{k + 1}/{len(rows)}", row(outcome), outcome.verdict, flush=True)
        if outcome.verdict not in GOOD or words:
            print(*outcome.texts, sep="\n---\n", flush=True)
    counts = Counter(outcome.verdict for outcome in outcomes)
    print(dict(counts))
    if not words:
        head, _, _ = PAGE.read_text().rpartition(f"\n\n{HEAD}")
        head, _, _ = head.rpartition("\n\n")  # the line of totals
        lines = "\n".join(map(row, outcomes))
        total = ", ".join(f"{n} {name}" for name, n in counts.items())
        table = f"{len(rows)} faults: {total}.\n\n{HEAD}{lines}\n"
        PAGE.write_text(f"{head}\n\n{table}")
    return sum(n for name, n in counts.items() if name not in GOOD)


def row(outcome: Outcome) -> str:
    """A row of the table."""
    fault = outcome.fault
    ranks = f"{', '.join(map(str, fault.ranks))} of {fault.size}"
    said = {
        text.partition(":")[0]
        for rank, text in enumerate(outcome.texts)
        if rank not in fault.ranks or fault.told
    }
    check = ", SHARDFN_CHECK=1" if "SHARDFN_CHECK" in fault.variables else ""
    seconds = "" if outcome.seconds is None or "right" in said else f"{outcome.seconds:.1f}"
    names = ", ".join(sorted(said))
    names = f"{names} ({outcome.verdict})" if outcome.verdict not in GOOD else names
    cells = (f"{fault.what}{check}", fault.when, ranks, f"{fault.timeout:g}", names, seconds)
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
