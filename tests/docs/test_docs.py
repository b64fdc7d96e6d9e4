"""The examples of each page in docs/ are one program, and it runs."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from tests.support.reading.source import ROOT

EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = [
    "auto-sharding.md",
    "checkpoints.md",
    "compare.md",
    "data.md",
    "experts.md",
    "locks.md",
    "mixed-precision.md",
    "per-rank-code.md",
    "pictures.md",
    "pipelines.md",
    "report.md",
    "sequences.md",
    "starting.md",
    "strategies.md",
    "testing.md",
    "timeline.md",
    "tour.md",
    "what-if.md",
]


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_run(
    page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = Path(ROOT, "docs", page).read_text()
    program = "\n".join(EXAMPLE.findall(text))
    assert program
    # a name of its own, as Dynamo remembers modules by name
    module = types.ModuleType(f"examples_of_{Path(page).stem.replace('-', '_')}")
    monkeypatch.chdir(tmp_path)  # some write files
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(program, f"docs/{page}", "exec"), vars(module))
