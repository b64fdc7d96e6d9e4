"""The laws on one NVIDIA GPU, `make gpu-check`: sharded and compiled steps against the single
device, and their speed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence

PACKAGES = {
    "optree": "optree",
    "attr": "attrs",
    "scipy": "scipy",
    "safetensors": "safetensors",
}  # module -> the package that brings it


def main(argv: Sequence[str] | None = None) -> int:
    """Check that there is something to check with; the rest is imported only then.

    Args:
        argv: `--device cuda | cpu`, `--quick`; None reads the command line.

    Returns:
        0 if everything holds or there is no GPU, 1 if something does not hold, 2 if a package
        is missing.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.check", description="The laws on one GPU."
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu walks the same path without a GPU",
    )
    parser.add_argument(
        "--quick", action="store_true", help="the smallest model, one size, few rounds"
    )
    args = parser.parse_args(argv)
    if args.device == "cuda" and (reason := no_gpu()):
        print(f"Nothing was checked: {reason}.")
        return 0
    missing = [
        package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None
    ]
    if missing:
        print(
            f"shardfn needs {' and '.join(missing)}, not installed for {sys.executable}; "
            "PYTHONPATH may name a folder with it."
        )
        return 2
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SHARDFN_CACHE_DIR"] = folder  # nothing is known from before
        laws = importlib.import_module("bench.gpu.laws")
        return laws.check(args.device, quick=args.quick)


def no_gpu() -> str | None:
    """Why there is no GPU to use, if so."""
    card = (
        "there is an NVIDIA GPU, but"
        if shutil.which("nvidia-smi")
        else "there is no NVIDIA GPU, and"
    )
    if importlib.util.find_spec("torch") is None:
        return f"{card} {sys.executable} has no torch"
    import torch

    return None if torch.cuda.is_available() else f"{card} torch {torch.__version__} finds none"


if __name__ == "__main__":
    sys.exit(main())
