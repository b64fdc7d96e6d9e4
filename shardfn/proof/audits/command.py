"""The command line of `audit`: `python -m shardfn audit train.py --world 8 -- --lr 0.1`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ...errors import ShardError
from .audit import audit

STEPS = 3


def main(argv: Sequence[str]) -> int:
    """Audit a script. Returns 0 if it computes what one device computes, 1 if not, 2 on errors."""
    parser = argparse.ArgumentParser(
        prog="python -m shardfn audit",
        description="run a torchrun script as n simulated ranks in one process, and compare the "
        "ranks with one device",
    )
    parser.add_argument("script", help="the path of the script")
    parser.add_argument("--world", type=int, help="the number of ranks (default: the mesh's, or 8)")
    parser.add_argument(
        "--mesh", type=sizes, help="names and sizes of mesh axes, such as dp=4,tp=2"
    )
    parser.add_argument(
        "--single",
        help="a script whose run on one device is compared with the ranks (default: the audited "
        "script, on one rank)",
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps (default: 3)")
    own = argv[: argv.index("--")] if "--" in argv else argv
    options = parser.parse_args(own)
    mesh = options.mesh
    try:
        found = audit(
            options.script,
            options.single,
            *argv[len(own) + 1 :],
            world=options.world,
            mesh=mesh,
            steps=options.steps,
        )
    except ShardError as error:
        print(error, file=sys.stderr)
        return 2
    print(found)
    return 0 if found.ok else 1


def sizes(text: str) -> dict[str, int]:
    """Read the sizes of axes: `dp=4,tp=2`."""
    pairs = [part.split("=") for part in text.split(",")]
    if any(len(pair) != 2 or not pair[1].isdigit() for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form dp=4,tp=2")
    return {name: int(n) for name, n in pairs}
