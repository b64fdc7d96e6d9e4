"""The table of patches: every row says what, why, until when and what is lost, and is undone."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from shardfn._compat import versions
from shardfn._compat.patches import PATCHES, STAYS, patched, rows_of_all
from shardfn._compat.patching import DEGRADE, REFUSE, is_due, resolve

ROOT = Path(__file__).parents[2]


def test_every_row_says_what_why_until_when_and_what_is_lost() -> None:
    for row in rows_of_all():
        assert row.what and row.why and row.until and row.lost
        assert row.calls or row.enter
        assert row.on_missing in (REFUSE, DEGRADE)
    assert all(what and why for what, why in STAYS)
    names = [row.what for row in rows_of_all()]
    assert len(names) == len({*names})


def test_rows_only_shrink() -> None:
    assert len(rows_of_all()) <= 61


def test_this_torch_has_every_place_with_its_arguments() -> None:
    assert {row.what: row.missing() for row in rows_of_all() if row.missing()} == {}


def test_versions_are_stated_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert versions.requirement() in project["dependencies"]
    assert project["version"] == versions.VERSION
    assert f"torch {versions.known()}" in (ROOT / "README.md").read_text()


def value(place: str) -> Any:
    owner, name = resolve(place) or (None, "")
    return getattr(owner, name)


@pytest.mark.parametrize("stage", ["fakes", "compilation"])
def test_torch_is_as_before_after_a_stage(stage: str) -> None:
    rows = PATCHES[stage]
    given = dict.fromkeys((row.takes for row in rows if row.takes), None)
    places = [p for row in rows for p in (*row.calls, *row.places) if is_due(p)]
    before = [value(place) for place in places]
    with patched(stage, **given):
        pass
    assert [value(place) for place in places] == before


def test_an_unknown_stage_or_a_missing_argument_is_an_error() -> None:
    with pytest.raises(KeyError), patched("no such stage"):
        pass
    takes = next(stage for stage, rows in PATCHES.items() for row in rows if row.takes)
    with pytest.raises(KeyError), patched(takes):
        pass
