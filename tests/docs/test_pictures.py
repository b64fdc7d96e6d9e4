"""The committed pictures are those that their script draws."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

import shardfn as sf
from tests.support.reading.source import ROOT

FOLDER = ROOT / "docs" / "pictures"
MOST = 60_000  # bytes


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures_of_the_docs", FOLDER / "draw.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dynamo reads its functions
    spec.loader.exec_module(module)
    return module


PICTURES = script().PICTURES


def structure(file: Path) -> tuple[Any, ...]:
    """The texts of a picture in order, its colours, and how many elements of each tag it has."""
    root = ElementTree.parse(file).getroot()
    texts = ["".join(x.itertext()) for x in root.iter() if x.tag.endswith("}text")]
    styles = Counter(x.get("style", "").partition(";")[0] for x in root.iter())
    return texts, Counter(x.tag for x in root.iter()), styles


@pytest.mark.parametrize("name", PICTURES)
def test_a_committed_picture_is_what_the_script_draws(name: str, tmp_path: Path) -> None:
    drawn, committed = tmp_path / "a.svg", FOLDER / f"{name}.svg"
    sf.draw(PICTURES[name](), path=drawn)
    assert structure(drawn) == structure(committed)
    assert committed.stat().st_size < MOST


def test_each_committed_picture_is_on_the_page() -> None:
    page = (ROOT / "docs" / "pictures.md").read_text()
    assert {file.stem for file in FOLDER.glob("*.svg")} == set(PICTURES)
    assert all(f"(pictures/{name}.svg)" in page for name in PICTURES)
