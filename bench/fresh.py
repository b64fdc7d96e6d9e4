"""A benchmark's child: a process of its own, with nothing stored but what a folder holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run(module: str, arguments: list[str], folder: str, **environment: str) -> dict[str, Any]:
    """Run a module of this repository in a fresh process.

    Args:
        module: its name.
        arguments: of its command line.
        folder: where it stores compilations.
        environment: further variables.

    Returns:
        The record that it prints in its last line.

    Raises:
        RuntimeError: it failed, with what it wrote.
    """
    given = {
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "SHARDFN_CACHE_DIR": f"{folder}/shardfn",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
        **environment,
    }
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, **given},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(arguments)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])
