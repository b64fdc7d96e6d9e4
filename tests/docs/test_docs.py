"""The code of each page in docs/ is one program. It runs, and prints what the page shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardfn.partition.rule_api import registry
from tests.support.reading.pages import cells, pages, printed
from tests.support.reading.source import ROOT

DOCS = Path(ROOT, "docs")


def names() -> list[str]:
    return [page.relative_to(DOCS).as_posix() for page in pages()]


@pytest.fixture(autouse=True)
def _rules_of_a_page() -> Iterator[None]:
    """Remove the sharding rules that a page registers: it does not run in a process of its own."""
    before = registry.active()
    yield
    for entry in registry.active():
        if entry not in before:
            registry.remove(entry)


@pytest.mark.parametrize("page", names())
def test_the_examples_of_a_page_run_and_print_what_it_shows(
    page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = (DOCS / page).read_text()
    monkeypatch.chdir(tmp_path)  # some write files
    for cell, output in zip(cells(text), printed(text, Path(page).stem), strict=True):
        if cell.shown is not None:
            assert output == cell.shown


@pytest.mark.parametrize("folder", ["learn", "howto", "reference"])
def test_pages_show_all_that_they_print(folder: str) -> None:
    """A part that calls print has an output, which the test above compares."""
    for page in sorted((DOCS / folder).glob("*.md")):
        for cell in cells(page.read_text()):
            if "\nprint(" in f"\n{cell.code}":
                assert cell.shown, f"{page.name}: {cell.code}"
