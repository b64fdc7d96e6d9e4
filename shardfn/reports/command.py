"""The command line of `report`: `python -m shardfn report train:step --mesh dp=8,tp=4`."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Sequence

from ..errors import ShardError
from ..hardware import HARDWARE
from ..mesh import make_mesh, use_mesh
from ..proof.audits.command import sizes
from ..world import fake_world
from .report import report
from .target import target_of


def main(argv: Sequence[str]) -> int:
    """Write the report of a step. Returns 0; 2 on errors."""
    parser = argparse.ArgumentParser(
        prog="python -m shardfn report",
        description="write a page about a step before it runs: does it fit, what bounds it, what "
        "it sends",
    )
    parser.add_argument("target", help="module:function, as train:step")
    parser.add_argument(
        "--mesh", type=sizes, required=True, help="names and sizes of axes, as dp=8,tp=4"
    )
    parser.add_argument("--hardware", default="H100", help=f"one of {', '.join(HARDWARE)}")
    parser.add_argument(
        "--arg",
        action="append",
        default=[],
        dest="shapes",
        metavar="SHAPE",
        help='an argument, as "f32[8@dp, 16]"; a function without arguments returns (step, args)',
    )
    parser.add_argument("--path", default="report.html", help="of the page (report.html)")
    options = parser.parse_args(argv)
    mesh = options.mesh
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(fake_world(math.prod(mesh.values()), numerics=False))
            made = make_mesh(tuple(mesh.values()), tuple(mesh))
            stack.enter_context(use_mesh(made))
            target = target_of(options.target, options.shapes)
            found = report(
                target.fn,
                *target.args,
                path=options.path,
                mesh=made,
                hardware=options.hardware,
                in_placements=target.in_placements,
            )
    except ShardError as error:
        print(error, file=sys.stderr)
        return 2
    print(found)
    return 0
