"""The demonstration on the terminal: progress, one table, one sentence, and two files."""

from __future__ import annotations

import argparse
import contextlib
import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence

import torch

from shardfn.inspect import doctor
from shardfn_demo import picture, runs, train
from shardfn_demo.verdict import differences, judge

EXTRA = "pip install 'shardfn[viz]'"
Watch = Callable[[str], runs.Progress]


def main(argv: Sequence[str] | None = None) -> int:
    """Train the same model in three worlds and report whether the numbers agree.

    Args:
        argv: `--steps N` and `--out DIR`; None reads the command line.

    Returns:
        0 if they agree, 1 if not.
    """
    parser = argparse.ArgumentParser(
        prog="python -m shardfn demo", description="One GPT training run in three worlds."
    )
    parser.add_argument(
        "--steps", type=positive, default=train.STEPS, help="training steps (default %(default)s)"
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("demo-report"),
        help="folder of the results",
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(
        1
    )  # the same in every world: the model is small, and the real processes share the cores
    with watching(args.steps) as watch:
        done = all_runs(runs.Job(steps=args.steps), watch)
    verdict = judge(done)
    show(done)
    print(*written(done, args.out), sep="\n")
    print(verdict.sentence)
    return 0 if verdict.holds else 1


def positive(text: str) -> int:
    """A number of steps from the command line."""
    n = int(text)
    if n < 1:
        raise argparse.ArgumentTypeError(f"got {n}, needed at least 1")
    return n


def all_runs(job: runs.Job, watch: Watch) -> list[runs.Run]:
    """The three runs, the single device first. Without a C++ compiler they are not compiled,
    and a line says so.
    """
    compiler = doctor.compiler()
    if not compiler.ok:
        print(compiler.sentence, "Here the two processes run with the latter.")
    backend = "inductor" if compiler.ok else "aten"
    return [
        runs.one_device(job, watch("one device")),
        runs.simulated(job, watch("8 simulated ranks, dp 2 x tp 4")),
        runs.processes(job, watch(f"2 Gloo processes, {backend}"), backend=backend),
    ]


@contextlib.contextmanager
def watching(steps: int) -> Iterator[Watch]:
    """The progress display of each run: bars with rich, lines without."""
    try:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )
    except ImportError:
        yield functools.partial(by_line, steps)
        return
    loss_column = TextColumn("{task.fields[loss]}")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        loss_column,
    )
    with Progress(*columns) as bars:

        def watch(name: str) -> runs.Progress:
            task = bars.add_task(f"{name:<32}", total=steps, loss="")
            return lambda loss: bars.update(task, advance=1, loss=f"loss {loss:.4f}")

        yield watch


def by_line(steps: int, name: str) -> runs.Progress:
    """Print a line when a run starts and when it ends."""
    print(f"{name}: {steps} steps", flush=True)
    losses: list[float] = []

    def progress(loss: float) -> None:
        losses.append(loss)
        if len(losses) == steps:
            print(f"{name}: loss {loss:.4f}", flush=True)

    return progress


def rows(done: list[runs.Run]) -> list[list[str]]:
    """The table: a heading, then one row for each figure, with a column for each run.

    Args:
        done: the runs, the single device first.

    Returns:
        Rows of equal length.
    """
    oracle, last = done[0], len(done[0].losses)
    marks = sorted({min(step, last) for step in (1, 10, last)})
    kinds = sorted({one.kind for run in done for one in run.collectives})
    return [
        ["", *(run.name for run in done)],
        *(
            [f"loss at step {step}", *(f"{run.losses[step - 1]:.6f}" for run in done)]
            for step in marks
        ),
        ["largest difference", "", *(f"{max(differences(oracle, run)):.1e}" for run in done[1:])],
        ["first call", *(f"{run.first_call_seconds:.2f} s" for run in done)],
        ["each other step", *(f"{run.seconds * 1e3:.0f} ms" for run in done)],
        *([f"{kind} a step", *(traffic(run, kind) for run in done)] for kind in kinds),
    ]


def traffic(run: runs.Run, kind: str) -> str:
    """The collectives of one kind in one step: how many, and their bytes."""
    return next(
        (f"{one.count}, {size(one.nbytes)}" for one in run.collectives if one.kind == kind), "none"
    )


def size(nbytes: int) -> str:
    """Bytes for people.

    Example:
        >>> size(512), size(4_200_000)
        ('512 B', '4.2 MB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} B"


def show(done: list[runs.Run]) -> None:
    """Print the table: with rich, or as plain text."""
    head, *body = rows(done)
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(*plain([head, *body]), f"(a table with colours, and bars: {EXTRA})", sep="\n")
        return
    table = Table(box=box.SIMPLE_HEAD)
    for i, name in enumerate(head):
        table.add_column(
            name, justify="right" if i else "left", style="" if i else "dim", overflow="fold"
        )
    for cells in body:
        table.add_row(*cells)
    Console().print(table)


def plain(table: list[list[str]]) -> list[str]:
    """A table as lines of text.

    Example:
        >>> plain([["", "one"], ["loss", "2.5"]])
        ['      one', 'loss  2.5']
    """
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join([cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])])
        for cells in table
    ]


def written(done: list[runs.Run], folder: pathlib.Path) -> list[str]:
    """Write the picture and the program of one simulated rank.

    Args:
        done: the runs, the single device first.
        folder: the output folder, created if missing.

    Returns:
        A line for each file: its path, or how to get it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    program, loss = folder / "local_program.txt", folder / "loss.png"
    program.write_text(next(run.program for run in done if run.program))
    try:
        picture.draw(done, loss)
    except ImportError:
        return [
            f"{program}: the program of one of the 8 ranks",
            f"no {loss.name}, which needs matplotlib: {EXTRA}",
        ]
    return [f"{program}: the program of one of the 8 ranks", f"{loss}: the loss of each run"]
