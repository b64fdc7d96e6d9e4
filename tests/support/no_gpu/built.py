"""Builds the library of CUDA without a GPU, and runs a program with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
TORCH = Path(torch.__file__).parent


def library(folder: Path) -> Path:
    """The library, compiled. A process loads it before torch."""
    path = folder / "device.so"
    lib = TORCH / "lib"
    subprocess.run(
        [
            "g++",
            "-std=c++20",
            "-O0",
            "-shared",
            "-fPIC",
            str(HERE / "device.cpp"),
            f"-I{TORCH / 'include'}",
            f"-L{lib}",
            f"-Wl,-rpath,{lib}",
            "-Wl,--no-as-needed",
            "-lc10",
            "-ltorch_cpu",
            "-o",
            str(path),
        ],
        check=True,
        timeout=300,
    )
    return path


def run(folder: Path, *names: str) -> dict[str, Any]:
    """What `captures` says of the programs of these names; of all without names."""
    done = subprocess.run(
        [sys.executable, "-m", "no_gpu.captures", str(library(folder)), *names],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=600,
        cwd=HERE.parents[2],
        env=_environment(),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def _environment() -> dict[str, str]:
    root = HERE.parents[2]
    path = [str(root), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": ":".join(filter(None, path))}
