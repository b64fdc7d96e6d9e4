"""`make fuzz`: random programs, random bad arguments of every public function and method, and
random trees for those that take trees.
"""

from __future__ import annotations

import collections
import concurrent.futures
import multiprocessing
import os
import random
import sys
import time
import traceback

import attrs

from tests.faults import bad_arguments, bad_specs, random_programs

VALUES = 8  # bad values of each parameter
SPECS = 35  # random trees a second


@attrs.frozen
class Tried:
    """What a process tried: how many programs of which kind, and its first failure as text."""

    counts: collections.Counter[str]
    failure: str = ""


def programs(seconds: float, seed: int) -> Tried:
    """Random programs for so many seconds."""
    try:
        return Tried(random_programs.run(seconds, seed))
    except Exception:
        return Tried(collections.Counter(), traceback.format_exc())


def specs(seconds: float, seed: int) -> tuple[int, list[bad_arguments.Failure]]:
    """Bad arguments of every function, and random trees, as many as fit in so many seconds: how
    many were tried, and the errors that are not named.
    """
    count = int(seconds * SPECS)
    tried, unnamed = bad_arguments.failures(seed, VALUES)
    return tried + count, [*unnamed, *bad_specs.failures(seed, count)]


def main() -> None:
    """Try for so many seconds, and print what came of it. A wrong value ends its process."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 600.0
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(2**32)
    print(f"seed {seed}, {seconds:.0f} seconds", flush=True)
    end = time.monotonic() + seconds
    others = max(1, (os.cpu_count() or 1) - 1)
    first, *seeds = [seed + (k << 20) for k in range(others + 1)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(others, context) as pool:
        found = [pool.submit(programs, seconds, row) for row in seeds]
        tried, unnamed = specs(seconds, seed)
        own = programs(end - time.monotonic(), first)
        rows = [own, *(future.result() for future in found)]
    counts = sum((row.counts for row in rows), collections.Counter[str]())
    for failure in unnamed:
        print(f"{failure.call}\n    {failure.error}")
    print(f"specs: {tried:,} tried, {len(unnamed)} unnamed errors")
    failed = [row.failure for row in rows if row.failure]
    print("\n".join(failed))
    print(f"programs: {dict(counts)}, {len(failed)} wrong values or unnamed errors")
    sys.exit(bool(unnamed or failed))


if __name__ == "__main__":
    main()
