"""The README's example runs, and prints what the README shows. The page is short."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.reading.source import ROOT

README = (ROOT / "README.md").read_text()
BLOCK = r"^```{}\n(.*?)^```"
WORDS = 900


def blocks(language: str) -> list[str]:
    return re.findall(BLOCK.format(language), README, re.DOTALL | re.MULTILINE)


def test_the_example_runs_and_prints_what_the_readme_shows(tmp_path: Path) -> None:
    (example,), (shown,) = blocks("python"), blocks("text")
    (tmp_path / "minute.py").write_text(example)
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "minute.py"],
        capture_output=True,
        text=True,
        env=path,
        cwd=tmp_path,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == "", "no stage says anything unless asked"
    stdout = run.stdout.replace(f"{tmp_path}/", "")
    printed = [line.rstrip() for line in stdout.splitlines()]
    assert printed == [line.rstrip() for line in shown.splitlines()]


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= WORDS
