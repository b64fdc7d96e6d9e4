"""`make long-runs`: many calls, functions and shapes in one process. Memory, threads and open
files stay as they are after the first quarter, when all tables are full.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

import shardfn as sf
from shardfn import P

COUNTS = {"calls": 10_000, "functions": 1_000, "shapes": 1_000}
SHARES = (0.25, 0.5, 0.75)  # of a run: nothing may grow after the first
MORE = 0.05  # by which memory may be more at the end, for what malloc does not return
MORE_MB = 30.0  # or so much, of some hundreds
RANKS = 2


@attrs.frozen
class Used:
    """What a process uses: memory in MB, threads, and open files."""

    memory: float
    threads: int
    files: int

    @classmethod
    def now(cls) -> Used:
        """What this process uses, without garbage."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        memory = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
        threads, files = (os.listdir(f"/proc/self/{x}") for x in ("task", "fd"))
        return cls(memory, len(threads), len(files))

    def __str__(self) -> str:
        return f"{self.memory:.0f} MB, {self.threads} threads, {self.files} files"


@attrs.frozen
class Run:
    """A run: what the process used after the warm-up, at each quarter, and at the end."""

    kind: str
    count: int
    used: tuple[Used, ...]

    @property
    def is_flat(self) -> bool:
        """Whether nothing has grown since the warm-up."""
        first, *_, last = self.used
        allowed = max(first.memory * MORE, MORE_MB)
        return (
            last.memory - first.memory <= allowed
            and last.threads <= first.threads
            and last.files <= first.files
        )

    def __str__(self) -> str:
        memory = " | ".join(f"{used.memory:.0f}" for used in self.used)
        first, *_, last = self.used
        threads = f"{first.threads}, {last.threads}"
        files = f"{first.files}, {last.files}"
        return f"| {self.count:,} {self.kind} | {memory} | {threads} | {files} |"


def _loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w).square().sum()


def _step(fn: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    return sf.shard(fn, mesh, (P(), P("dp")), backend="aten")


def _calls(mesh: Any) -> Iterator[None]:
    """One function on equal shapes."""
    w, x = torch.randn(3, 2), torch.randn(5, 3)
    step = _step(_loss, mesh)
    while True:
        sf.full(step(w, x))
        yield


def _functions(mesh: Any) -> Iterator[None]:
    """A function more each time, of another program."""
    w, x = torch.randn(3, 2), torch.randn(5, 3)
    number = 0
    while True:
        number += 1
        scale = float(number)
        step = _step(lambda w, x, scale=scale: _loss(w, x) * scale, mesh)
        sf.full(step(w, x))
        yield


def _shapes(mesh: Any) -> Iterator[None]:
    """One function on another shape each time."""
    w, step = torch.randn(3, 2), _step(_loss, mesh)
    rows = 1
    while True:
        rows += 1
        sf.full(step(w, torch.randn(rows, 3)))
        yield


KINDS: dict[str, Callable[[Any], Iterator[None]]] = {
    "calls": _calls,
    "functions": _functions,
    "shapes": _shapes,
}


def run(kind: str, count: int, mesh: Any, shares: Sequence[float] = SHARES) -> Run:
    """Do it so many times.

    Args:
        kind: "calls", "functions" or "shapes".
        count: how many.
        mesh: of one axis, "dp".
        shares: of the run after which to look at the process, the warm-up first.
    """
    looks = {int(count * share) for share in shares} | {count}
    used = []
    times = KINDS[kind](mesh)
    for number in range(1, count + 1):
        next(times)
        if number in looks:
            used.append(Used.now())
    return Run(kind, count, tuple(used))


def main(argv: Sequence[str] | None = None) -> int:
    """Print what each run uses. Returns 0 if all are flat."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.long_runs")
    parser.add_argument("kinds", nargs="*", default=list(COUNTS))
    parser.add_argument("--part", type=float, default=1.0, help="0.1: a tenth")
    options = parser.parse_args(argv)
    print("| run | MB after 25 % | 50 % | 75 % | 100 % | threads | files |")
    print("|---|---|---|---|---|---|---|")
    runs = []
    with sf.fake_world(RANKS):
        mesh = sf.make_mesh((RANKS,), ("dp",))
        for kind in options.kinds:
            runs.append(run(kind, int(COUNTS[kind] * options.part), mesh))
            print(runs[-1], flush=True)
    grown = [row.kind for row in runs if not row.is_flat]
    print("grown: " + ", ".join(grown) if grown else "flat")
    return bool(grown)


if __name__ == "__main__":
    sys.exit(main())
