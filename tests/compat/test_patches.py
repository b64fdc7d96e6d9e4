"""The table of patches: every row says what, why and until when, and is undone."""

from __future__ import annotations

import pkgutil
from typing import Any

import pytest

from shardfn._compat.patches import PATCHES, STAYS, patched
from shardfn._compat.patching import RENAMED

ROWS = [(stage, row) for stage, rows in PATCHES.items() for row in rows]


def test_every_row_says_why_and_until_when() -> None:
    for stage, row in ROWS:
        assert row.why and row.until and row.what, stage
        assert (row.new is None) != (row.enter is None), row.what
    assert all(what and why for what, why in STAYS)


def exists(place: str) -> bool:
    module, _, inside = place.partition(":")
    try:
        pkgutil.resolve_name(f"{module}:{inside}")
    except (AttributeError, ImportError):
        return False
    return True


def test_every_place_that_must_exist_does() -> None:
    places = [p for _, row in ROWS if row.new and not row.optional for p in row.what]
    gone = [p for p in places if not exists(p) and not exists(RENAMED.get(p, p))]
    assert not gone


def value(place: str) -> Any:
    module, _, inside = place.partition(":")
    return pkgutil.resolve_name(f"{module}:{inside}")


@pytest.mark.parametrize("stage", ["fakes", "compilation"])
def test_torch_is_as_before_after_a_stage(stage: str) -> None:
    rows = PATCHES[stage]
    given = dict.fromkeys((row.takes for row in rows if row.takes), None)
    places = [p for row in rows if row.new and not row.takes for p in row.what if exists(p)]
    before = [value(place) for place in places]
    with patched(stage, **given):
        pass
    assert [value(place) for place in places] == before


def test_an_unknown_stage_or_a_missing_argument_is_an_error() -> None:
    with pytest.raises(KeyError), patched("no such stage"):
        pass
    takes = next(stage for stage, row in ROWS if row.takes)
    with pytest.raises(KeyError), patched(takes):
        pass
