"""`make fuzz`: random bad arguments of every public function, then random programs."""

from __future__ import annotations

import random
import sys

from tests.faults import bad_arguments, random_programs

VALUES = 8  # bad values of each parameter


def main() -> None:
    """Try for so many seconds, and print what came of it. A wrong value ends it."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 600.0
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(2**32)
    print(f"seed {seed}, {seconds:.0f} seconds", flush=True)
    unnamed = bad_arguments.failures(seed, VALUES)
    for row in unnamed:
        print(f"{row.call}\n    {row.error}")
    print(f"bad arguments: {len(unnamed)} unnamed errors", flush=True)
    counts = random_programs.run(seconds, seed)
    print(f"random programs: {dict(counts)}")
    sys.exit(bool(unnamed))


if __name__ == "__main__":
    main()
