"""`python -m bench.published`: the table of published figures beside what the model says."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .fit import fitted
from .table import TABLES, Row

PAGE = Path("docs/time-model.md")
HEAD = """\
| run | published by | published | here | error | verdict | note |
|---|---|---:|---:|---:|---|---|"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables, and write them to the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.published")
    parser.add_argument("--only", default="", help="rows whose name contains this text")
    parser.add_argument("--fit", action="store_true", help="fit the power of the card")
    parser.add_argument("--write", action="store_true", help=f"write the tables to {PAGE}")
    args = parser.parse_args(argv)
    if args.fit:
        print(fitted())
        return 0
    is_met = True
    for title, rows in TABLES.items():
        print(f"\n{title}\n{HEAD}", flush=True)
        for row in rows:
            if args.only in row.name:
                line, met = row.text()
                is_met = is_met and (met or bool(row.note))
                print(line, flush=True)
                if args.write:
                    write(title, row, line)
    return 0 if is_met else 1


def write(title: str, row: Row, line: str) -> None:
    """Write a line to its place in a table of the page. Lines of rows that are no more go."""
    begin, end = f"<!-- table of {title} -->\n", f"<!-- end of {title} -->"
    before, rest = PAGE.read_text().split(begin)
    table, after = rest.split(end)
    places = [x.key for x in TABLES[title]]
    lines = {_key(x): x for x in table.splitlines()[2:]}
    lines[row.key] = line
    found = [lines[x] for x in places if x in lines]
    text = "\n".join([HEAD, *found])
    PAGE.write_text(f"{before}{begin}{text}\n{end}{after}")


def _key(line: str) -> tuple[str, ...]:
    """Return what a line has before what is predicted."""
    return tuple(x.strip() for x in line.split("|")[1:4])


if __name__ == "__main__":
    sys.exit(main())
