"""Tables are for reading: short cells, and no row that is wider than a screen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.reading.source import ROOT

WORDS = 25  # of a cell
COLUMNS = 160  # of a row, as it is read: without the targets of links
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
TABLE = re.compile(r"^<!-- table of .*?^<!-- end of .*?$", re.DOTALL | re.MULTILINE)
TARGET = re.compile(r"\]\([^)]*\)")
WRITTEN = ("logs",)  # commands write these, and the tables between comments

PAGES = [page for page in sorted(Path(ROOT, "docs").rglob("*.md")) if "names" not in page.parts]
READ = [*PAGES, *sorted(ROOT.glob("*.md"))]


def rows(text: str) -> list[str]:
    """The rows of the tables of a page, without the targets of links."""
    lines = TABLE.sub("", FENCE.sub("", text)).splitlines()
    return [TARGET.sub("]", line) for line in lines if line.lstrip().startswith("|")]


def faults(text: str) -> list[str]:
    """The rows of a page that are hard to read."""
    return [row for row in rows(text) if len(row) > COLUMNS or widest(row) > WORDS]


def widest(row: str) -> int:
    """The most words of a cell."""
    return max(len(cell.split()) for cell in re.split(r"(?<!\\)\|", row))


@pytest.mark.parametrize("page", READ, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_tables_are_short(page: Path) -> None:
    if set(WRITTEN).isdisjoint(page.parts):
        assert faults(page.read_text()) == []


def test_wide_rows_and_long_cells_are_noticed() -> None:
    wide = f"| {'x' * COLUMNS} |"
    long = f"| {'a ' * (WORDS + 1)}|"
    assert faults(f"| a | b |\n{wide}\n{long}\n```\n{wide}\n```\n") == [wide, long]


def test_the_page_on_operators_quotes_the_totals_of_the_log() -> None:
    page, log = ((ROOT / "docs" / name / "conformance.md").read_text() for name in ("", "logs"))
    assert FENCE.findall(page) == FENCE.findall(log) != []
