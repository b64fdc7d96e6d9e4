"""The site: a page for each public name, each page in the tree, and how pages become cells."""

from __future__ import annotations

import doctest
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import shardfn as sf
from shardfn import errors
from tests.support.reading.source import PACKAGE, ROOT, files

DOCS = Path(ROOT, "docs")


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"site_{name}", DOCS / "_site" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


site, reference = loaded("pages"), loaded("reference")


def documents() -> list[Path]:
    written = [page for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.parts]
    return [page for page in written if "names" not in page.parts]


@pytest.mark.parametrize("module", [site, reference], ids=["pages", "reference"])
def test_the_examples_of_the_site_run(module: ModuleType) -> None:
    tried = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert tried.attempted and not tried.failed


def test_no_public_name_lacks_an_entry_of_the_reference() -> None:
    names = reference.names()
    assert set(sf.__all__) - set(names) == set()
    assert len(names) == len(set(names)) == len(sf.__all__)
    for name in names:
        assert reference.entry(name).startswith(f"sf.{name}\n===")


def test_the_tree_has_every_page() -> None:
    placed = {"index"}
    for tree in site.TREES:
        page = DOCS / f"{tree}.md"
        for path in site.ITEM.findall(page.read_text()):
            placed.add((page.parent / path).relative_to(DOCS).as_posix())
    pages = {page.relative_to(DOCS).with_suffix("").as_posix() for page in documents()}
    assert pages - placed == set()


def test_search_passes_over_logs() -> None:
    for log in (DOCS / "logs").glob("*.md"):
        text = site.page(f"logs/{log.stem}", log.read_text(), sf.__all__)
        assert text.startswith("---\nno-search: true\n---\n\n# Log: ")


def test_each_error_has_a_section() -> None:
    page = (DOCS / "reference" / "errors.md").read_text()
    sections = set(re.findall(r"^## (\w+)$", page, re.MULTILINE))
    classes = [x for x in vars(errors).values() if isinstance(x, type)]
    kinds = {x.__name__ for x in classes if issubclass(x, errors.ShardError)}
    assert sections == kinds - {"ShardError"}


def test_each_environment_variable_has_a_row() -> None:
    page = (DOCS / "reference" / "environment.md").read_text()
    rows = set(re.findall(r"^\| `(SHARDFN_\w+)`", page, re.MULTILINE))
    texts = [file.read_text() for file in files(PACKAGE)]
    assert rows == set(re.findall(r"SHARDFN_[A-Z_]+", "\n".join(texts)))


def test_the_page_of_versions_is_that_of_the_package() -> None:
    page = (DOCS / "reference" / "versions.md").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    low, high = re.search(r'"torch>=2\.(\d+),<2\.(\d+)"', project).groups()
    assert f"| torch | 2.{low} to 2.{int(high) - 1} |" in page
    pythons = re.findall(r"Python :: 3\.(\d+)", project)
    assert f"| Python | 3.{pythons[0]} to 3.{pythons[-1]} |" in page
