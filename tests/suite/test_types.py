"""The types of the whole code, with the torch that is pinned."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PINNED = (ROOT / "constraints.txt").read_text()


@pytest.mark.skipif(
    f"torch=={torch.__version__.partition('+')[0]}" not in PINNED,
    reason="another torch has other types",
)
def test_pyright_has_nothing_to_report() -> None:
    pyright = Path(sys.executable).with_name("pyright")
    done = subprocess.run(
        [pyright, "--pythonpath", sys.executable],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
