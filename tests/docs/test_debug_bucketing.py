"""docs/debug-bucketing.md is true: its pdb session is driven as it is written."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROMPT = "(Pdb) "
LOOSE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def session() -> list[tuple[str, str]]:
    """(command, what it shows) for each prompt of the page."""
    page = (ROOT / "docs" / "debug-bucketing.md").read_text()
    blocks = re.findall(r"```pdb\n(.*?)```", page, re.DOTALL)
    entries = [entry for block in blocks for entry in block.split(PROMPT)[1:]]
    return [(command, shown) for command, _, shown in (entry.partition("\n") for entry in entries)]


def test_s1_3_pdb_stops_inside_the_bucketing_pass_in_a_fake_world_of_8_as_the_page_shows() -> None:
    commands, shown = zip(*session(), strict=True)
    done = subprocess.run(
        [sys.executable, "-m", "pdb", "examples/debug_bucketing.py"],
        cwd=ROOT,
        input="\n".join([*commands, "quit", ""]),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    answers = done.stdout.split(PROMPT)[1:]
    assert len(answers) >= len(commands), done.stdout + done.stderr
    checker = doctest.OutputChecker()
    for command, wanted, got in zip(commands, shown, answers, strict=False):
        assert checker.check_output(wanted, got, LOOSE), (
            f"{PROMPT}{command}\n{got}\nthe page shows\n{wanted}"
        )
