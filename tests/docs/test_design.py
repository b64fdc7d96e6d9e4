"""The map of the code is true: what docs/design.md and its pages name exists, and links lead on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MAPS = [ROOT / "docs" / "design.md", *sorted((ROOT / "docs" / "design").glob("*.md"))]
PLACE = re.compile(r"`([a-z_]+(?:/[\w.]+)*(?:/|\.py|\.h))`")
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#]+)")


@pytest.mark.parametrize("page", MAPS, ids=lambda page: page.stem)
def test_every_place_that_the_map_names_exists(page: Path) -> None:
    named = set(PLACE.findall(page.read_text()))
    gone = [
        x for x in named if not any((folder / x).exists() for folder in (ROOT, ROOT / "shardfn"))
    ]
    assert named and not gone


def test_every_link_between_pages_leads_to_a_page() -> None:
    texts = {page: CODE.sub("code", page.read_text()) for page in PAGES}
    links = [(page, target) for page in PAGES for target in LINK.findall(texts[page])]
    assert len(links) > 50
    assert not [(page.name, x) for page, x in links if not (page.parent / x).exists()]
