"""From the start of a process to the first result of the demo's training step: cold, with what an
earlier process has stored, through an artefact, and next to torch.compile and JAX.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import fresh

RUNS = 5
ARTEFACT = "step.sf"
Run = dict[str, float]


def arguments() -> tuple[Any, ...]:
    """The demo's step and its arguments."""
    from bench.stages import step_and_args

    return step_and_args()


def shardfn_step(**options: Any) -> float:
    """The first loss of the step under `jit`."""
    import shardfn as sf

    step, args = arguments()
    return float(sf.jit(step, **options)(*args)[2])


def saving() -> float:
    """The step, compiled and saved as an artefact."""
    import shardfn as sf

    step, args = arguments()
    compiled = sf.jit(step).compile(*args)
    compiled.save(os.environ["BENCH_ARTEFACT"])
    return float(compiled(*args)[2])


def artefact() -> float:
    """The first loss of the loaded step."""
    import shardfn as sf

    loaded = sf.load_compiled(os.environ["BENCH_ARTEFACT"])
    _, args = arguments()
    return float(loaded(*args)[2])


def torch_step() -> float:
    """The first loss of the same step in plain torch, under torch.compile."""
    import torch

    from bench.gpu.laws import plain_step
    from shardfn_demo import gpt

    _, args = arguments()
    step = torch.compile(plain_step(gpt.Config()), fullgraph=True, dynamic=False)
    return float(step(*args)[2])


def jax_step() -> float:
    """The first loss of the same step in JAX."""
    from bench.start import jax_step as model

    return model.first_loss(os.environ["BENCH_ARGUMENTS"])


def write_arguments(folder: str) -> None:
    """Write the arguments to files, for a process that does not import torch."""
    import numpy as np

    import shardfn as sf
    from shardfn_demo import gpt, train

    leaves: list[Any] = []

    def number(x: Any) -> int:
        leaves.append(x.numpy())
        return len(leaves) - 1

    tree = sf.tree_map(number, arguments()[1])
    np.savez(Path(folder, "leaves.npz"), *leaves)
    said = {"arguments": tree, "lr": train.LR, "heads": gpt.Config().heads}
    Path(folder, "tree.json").write_text(json.dumps(said))


STEPS: dict[str, Callable[[], float]] = {
    "jit": shardfn_step,
    "warmup": lambda: shardfn_step(warmup="aten"),
    "saving": saving,
    "artefact": artefact,
    "torch": torch_step,
    "jax": jax_step,
}
# what a row runs: the step in a process of its own, after another process or not
ROWS = {
    "shardfn, cold": ("jit", None),
    'shardfn, cold, warmup="aten"': ("warmup", None),
    "shardfn, stored compilation": ("jit", "saving"),
    "shardfn, artefact": ("artefact", "saving"),
    "torch.compile, cold": ("torch", None),
    "torch.compile, its caches filled": ("torch", "torch"),
    "jax.jit, cold": ("jax", None),
    "jax.jit, its cache filled": ("jax", "jax"),
}


def child(name: str) -> None:
    """The work of a process: one step. Prints when its first result came, and its loss."""
    loss = STEPS[name]()
    now = time.time()
    taken = [resource.getrusage(who) for who in (0, resource.RUSAGE_CHILDREN)]
    spent = sum(x.ru_utime + x.ru_stime for x in taken)
    print(json.dumps({"at": now, "spent": spent, "loss": loss}), flush=True)
    os._exit(0)  # a program that is still compiled in the background is not waited for


def run(name: str, folder: str, given_by: str) -> Run:
    """The step in a fresh process.

    Returns:
        `wall`: seconds from the start of the process to the first result; `spent`: seconds of
        processor time, the compiler's included; `loss`.
    """
    given = {
        "JAX_COMPILATION_CACHE_DIR": f"{folder}/jax",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "BENCH_ARGUMENTS": given_by,
        "BENCH_ARTEFACT": f"{folder}/{ARTEFACT}",
    }
    start = time.time()
    found = fresh.run("bench.start", [name], folder, **given)
    return {**found, "wall": found["at"] - start}


def measured(name: str, before: str | None, folders: dict[str, str]) -> Run:
    """One run: in a folder of its own, or in one that another process has filled.

    Args:
        name: the step.
        before: the step of the process that has filled the folder, once for all runs.
        folders: the filled folders by step, and that of the arguments.
    """
    if before is not None:
        if before not in folders:
            folders[before] = tempfile.mkdtemp(dir=folders["arguments"])
            run(before, folders[before], folders["arguments"])
        return run(name, folders[before], folders["arguments"])
    with tempfile.TemporaryDirectory() as folder:
        return run(name, folder, folders["arguments"])


def table(rows: dict[str, list[Run]]) -> str:
    """Medians, with the least and the most.

    Example:
        >>> runs = [{"wall": 2.0, "spent": 3.0}, {"wall": 4.0, "spent": 3.5}]
        >>> print(table({"shardfn, cold": runs}))
                                           first result, s        processor time, s
        shardfn, cold                      3.0 (2.0 to 4.0)       3.2 (3.0 to 3.5)
    """
    lines = [f"{'':<34} {'first result, s':<22} processor time, s"]
    for name, runs in rows.items():
        cells = [_spread([x[key] for x in runs]) for key in ("wall", "spent")]
        lines.append(f"{name:<34} {cells[0]:<22} {cells[1]}")
    return "\n".join(lines)


def _spread(xs: list[float]) -> str:
    return f"{statistics.median(xs):.1f} ({min(xs):.1f} to {max(xs):.1f})"


def main(runs: int = RUNS, cold: int | None = None) -> None:
    """Run every row so many times, in turn, and print the table.

    Args:
        runs: of each row.
        cold: of the rows that start with nothing stored; as many without it.
    """
    rows = {name: row for name, row in ROWS.items() if row[0] != "jax"}
    if importlib.util.find_spec("jax"):
        rows = ROWS
    else:
        print("jax is not installed, so it is left out: pip install 'shardfn[bench]'")
    found: dict[str, list[Run]] = {name: [] for name in rows}
    with tempfile.TemporaryDirectory() as folder:
        write_arguments(folder)
        folders = {"arguments": folder}
        for k in range(runs):
            for name, (step, before) in rows.items():
                if before is None and k >= (runs if cold is None else cold):
                    continue
                found[name].append(measured(step, before, folders))
                print(f"... {name}: {_told(found[name][-1])}", flush=True)
    losses = [x["loss"] for every in found.values() for x in every]
    if max(losses) - min(losses) > 1e-4:
        raise RuntimeError(f"the losses differ: {losses}")
    print(table(found))


def _told(x: Run) -> str:
    return f"{x['wall']:.1f} s, {x['spent']:.1f} s of processor time"


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in STEPS:
        child(sys.argv[1])
    else:
        main(*map(int, sys.argv[1:]))
