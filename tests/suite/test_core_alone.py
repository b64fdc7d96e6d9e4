"""The core runs its laws without the rooms over it: they are left out of a copy of the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.launched import free_port, variables
from tests.suite.test_layers import ROOMS
from tests.support.reading.source import PACKAGE, ROOT

PROGRAMS = ROOT / "tests" / "suite" / "core_programs.py"


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package without its rooms."""
    folder = tmp_path_factory.mktemp("core")
    rooms = shutil.ignore_patterns(*ROOMS)
    shutil.copytree(PACKAGE, folder / "shardfn", ignore=rooms)
    assert not any((folder / "shardfn" / room).exists() for room in ROOMS)
    return folder


def started(core: Path, program: str, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(core), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, str(PROGRAMS), program]
    return subprocess.Popen(
        command,
        env=environment,
        cwd=core,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def check_right(process: subprocess.Popen[str], core: Path) -> None:
    """Check that the programs of a process were right, and that it ran the copy."""
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 0, text
    assert f"right, in {core / 'shardfn'}" in text


def test_simulated_programs(core: Path) -> None:
    check_right(started(core, "simulated"), core)


def test_two_real_ranks(core: Path) -> None:
    rows = variables(2, free_port(), GLOO_SOCKET_IFNAME="lo")
    processes = [started(core, "ranks", **row) for row in rows]
    for process in processes:
        check_right(process, core)
