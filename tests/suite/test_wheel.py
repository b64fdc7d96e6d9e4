"""The wheel has all that the package reads, and works where the checkout is not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.reading.source import ROOT

PACKAGES = ("shardfn", "shardfn_demo", "shardfn_pytest")
PROGRAM = """
import torch, shardfn as sf
with sf.fake_world(2):
    mesh = sf.make_mesh((2,), ("dp",))
    total = sf.shard(lambda x: x.sum(), mesh, sf.P("dp"))(torch.arange(5.0))
    print(sf.__file__, float(sf.full(total)))
"""


def pip(*args: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", folder, ROOT)
    (built,) = folder.glob("*.whl")
    return built


def test_it_has_every_file_of_the_packages(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()]
    wanted = {
        path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts
    }
    assert len(wanted) > 500 and not wanted - names
    assert not [name for name in names if name.startswith(("tests", "bench"))]


def test_it_needs_five_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
    needed = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra ==)", text, re.MULTILINE)
    assert sorted(needed) == ["attrs", "optree", "safetensors", "scipy", "torch"]


def test_it_is_installed_with_its_command_and_runs(wheel: Path, tmp_path: Path) -> None:
    pip("install", "--no-deps", "--target", tmp_path, wheel)
    path = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(run, capture_output=True, text=True, env=path, cwd=tmp_path, check=False)
    assert done.stdout.split() == [str(tmp_path / "shardfn" / "__init__.py"), "10.0"], done.stderr
    command = [sys.executable, tmp_path / "bin" / "shardfn", "--help"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=path, cwd=tmp_path, check=False
    )
    assert done.returncode == 0 and "doctor" in done.stdout, done.stderr
