"""The examples of each page in docs/ are one program, and it runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.reading.sizes import ROOT

EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = ["checkpoints.md"]


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_run(page: str) -> None:
    text = Path(ROOT, "docs", page).read_text()
    program = "\n".join(EXAMPLE.findall(text))
    assert program
    exec(compile(program, f"docs/{page}", "exec"), {"__name__": page})
