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
        description="write an HTML report on a step before the step runs: whether it fits in "
        "memory, its bottleneck and its communication",
    )
    parser.add_argument("target", help="the step as module:function, such as train:step")
    parser.add_argument(
        "--mesh", type=sizes, required=True, help="names and sizes of mesh axes, such as dp=8,tp=4"
    )
    parser.add_argument("--hardware", default="H100", help=f"one of {', '.join(HARDWARE)}")
    parser.add_argument(
        "--arg",
        action="append",
        default=[],
        dest="shapes",
        metavar="SHAPE",
        help='the dtype and shape of one argument, such as "f32[8@dp, 16]"; without --arg the '
        "function must return (step, args)",
    )
    parser.add_argument(
        "--path", default="report.html", help="the path of the report (default: report.html)"
    )
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
