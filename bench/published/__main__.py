"""`python -m bench.published`: the table of published figures beside what the model says."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .fit import fitted
from .table import TABLES

PAGE = Path("docs/time-model.md")
HEAD = """\
| run | published by | published | here | error | verdict | note |
|---|---|---:|---:|---:|---|---|"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables, and write them to the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.published")
    parser.add_argument("--only", default="", help="rows whose name contains this text")
    parser.add_argument("--fit", action="store_true", help="fit the efficiencies, and print them")
    parser.add_argument("--write", action="store_true", help=f"write the tables to {PAGE}")
    args = parser.parse_args(argv)
    if args.fit:
        print(fitted())
        return 0
    is_met = True
    for title, rows in TABLES.items():
        lines = [HEAD]
        print(f"\n{title}\n{HEAD}", flush=True)
        for row in rows:
            if args.only in row.name:
                line, met = row.text()
                is_met = is_met and (met or bool(row.note))
                lines.append(line)
                print(line, flush=True)
        if args.write:
            write(title, "\n".join(lines))
    return 0 if is_met else 1


def write(title: str, table: str) -> None:
    """Replace a table of the page."""
    begin, end = f"<!-- table of {title} -->\n", f"<!-- end of {title} -->"
    before, rest = PAGE.read_text().split(begin)
    _, after = rest.split(end)
    PAGE.write_text(f"{before}{begin}{table}\n{end}{after}")


if __name__ == "__main__":
    sys.exit(main())
