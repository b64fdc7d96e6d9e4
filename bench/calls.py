"""The price of one call, `make bench-calls`: a compiled step on a tree of small leaves, beside
torch.compile and jax.jit.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import multiprocessing
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from bench import rivals
from bench.rivals import DONATED, DTENSOR, JAX, PLAIN, SHARDFN

SIZES, QUICK = (1, 10, 100, 300), (1, 10)
ROUNDS, QUICK_ROUNDS = 60, 5
CALL, LEAF = (
    60.0,
    4.0,
)  # the target, microseconds: at most so much a call, and so much for each of its leaves

Medians = dict[int, dict[str, float]]  # leaves -> name -> microseconds a call
Pipes = dict[
    str, Any
]  # name -> the connection to the process that runs it; "" is rank 1, which runs nothing


def main(argv: Sequence[str] | None = None) -> int:
    """Time the calls, print the table, judge.

    Args:
        argv: `--quick`; None reads the command line.

    Returns:
        0 if the target is met, 1 if not.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bench.calls", description="The price of one call."
    )
    parser.add_argument("--quick", action="store_true", help="small trees, few rounds")
    quick = parser.parse_args(argv).quick
    with processes() as pipes:
        medians = timed(pipes, QUICK if quick else SIZES, QUICK_ROUNDS if quick else ROUNDS)
    print(table(medians))
    print(shares(medians))
    print(verdict(medians))
    return 0 if met(medians) else 1


@contextlib.contextmanager
def processes() -> Iterator[Pipes]:
    """Two torch ranks and, where it is installed, JAX: each waits on its pipe while another is
    timed.
    """
    context = multiprocessing.get_context("spawn")
    started, pipes = [], {}

    def start(target: Any, *args: Any) -> Any:
        mine, theirs = context.Pipe()
        started.append(context.Process(target=target, args=(*args, theirs), daemon=True))
        started[-1].start()
        theirs.close()  # so that recv fails when the process dies
        return mine

    with tempfile.TemporaryDirectory() as folder:
        store = (pathlib.Path(folder) / "store").as_uri()
        first = start(rivals.torch_rank, 0, store)
        pipes.update(dict.fromkeys((SHARDFN, DONATED, DTENSOR, PLAIN), first))
        pipes[""] = start(rivals.torch_rank, 1, store)
        if importlib.util.find_spec("jax"):
            pipes[JAX] = start(rivals.jax_process)
        else:
            print("jax is not installed, so it is left out: pip install 'shardfn[bench]'")
        yield pipes
        for process in started:
            process.join()


def timed(pipes: Pipes, sizes: Sequence[int], rounds: int) -> Medians:
    """Median microseconds a call of each at each size, from rounds in which everything runs once.

    Args:
        pipes: of `processes`.
        sizes: leaves of the trees.
        rounds: how many; each size has its share of a busy minute, and no size all of it.

    Returns:
        Size -> name -> microseconds.

    Raises:
        RuntimeError: what was timed was not the step, or was compiled while it was timed.
    """
    told(pipes, sizes)
    heard(pipes)
    names = [name for name in pipes if name]
    found: dict[int, dict[str, list[float]]] = {n: {name: [] for name in names} for n in sizes}
    for turn in range(rounds):
        first = turn % len(names)
        for n, name in itertools.product(sizes, names[first:] + names[:first]):
            pipes[name].send((n, name, max(10, 2000 // n)))
            found[n][name].append(pipes[name].recv())
    told(pipes, None)
    faults = [fault for said in heard(pipes) for fault in said]
    if faults:
        raise RuntimeError("; ".join(faults))
    return {
        n: {name: statistics.median(times) for name, times in by_name.items()}
        for n, by_name in found.items()
    }


def told(pipes: Pipes, what: Any) -> None:
    """Say one thing to every process."""
    for pipe in dict.fromkeys(pipes.values()):
        pipe.send(what)


def heard(pipes: Pipes) -> list[Any]:
    """One answer from every process."""
    return [pipe.recv() for pipe in dict.fromkeys(pipes.values())]


def met(medians: Medians) -> bool:
    """Whether shardfn keeps to the target at every size."""
    return all(times[SHARDFN] <= limit(n) for n, times in medians.items())


def limit(leaves: int) -> float:
    """The most that a call may take, in microseconds."""
    return CALL + LEAF * leaves


def verdict(medians: Medians) -> str:
    """The target, and whether it is met.

    Example:
        >>> verdict({10: {"shardfn": 101.0}})
        'Missed: at most 60 us a call and 4 us a leaf; 10 leaves took 101 us, at most 100.'
    """
    target = f"at most {CALL:.0f} us a call and {LEAF:.0f} us a leaf"
    over = {n: times[SHARDFN] for n, times in medians.items() if times[SHARDFN] > limit(n)}
    said = ", ".join(
        f"{n} leaves took {us:.0f} us, at most {limit(n):.0f}" for n, us in over.items()
    )
    return f"Missed: {target}; {said}." if over else f"Met: {target}."


def shares(medians: Medians) -> str:
    """shardfn's time as a share of its rivals' on the largest tree, with fresh and with donated
    results.

    Example:
        >>> times = {"shardfn": 5.0, "shardfn, donated": 2.5, "jax.jit, 2 devices": 10.0}
        >>> print(shares({300: times}))
        300 leaves, jax.jit, 2 devices: fresh 0.50, donated 0.25
    """
    leaves, times = max(medians.items())
    mine = {"fresh": times[SHARDFN], "donated": times[DONATED]}
    lines = []
    for rival in (JAX, PLAIN):
        if rival in times:
            rows = (f"{name} {us / times[rival]:.2f}" for name, us in mine.items())
            lines.append(f"{leaves} leaves, {rival}: {', '.join(rows)}")
    return "\n".join(lines)


def table(medians: Medians) -> str:
    """A line for each size and rival; the last column is shardfn's time as a share of the rival's.

    Example:
        >>> print(table({10: {"shardfn": 50.0, "jax.jit, 2 devices": 100.0}}))
         leaves  median of a step that adds one     us a call   us a leaf    shardfn/it
             10  shardfn                                 50.0        5.00
                 jax.jit, 2 devices                     100.0       10.00          0.50
    """
    lines = [
        (
            f"{'leaves':>7}  "
            f"{'median of a step that adds one':<33}{'us a call':>10}"
            f"{'us a leaf':>12}{'shardfn/it':>14}"
        )
    ]
    for n, times in medians.items():
        for name, us in times.items():
            share = f"{times[SHARDFN] / us:>14.2f}" if name != SHARDFN else ""
            lines.append(
                (
                    f"{n if name == SHARDFN else '':>7}  "
                    f"{name:<33}{us:>10.1f}{us / n:>12.2f}{share}"
                ).rstrip()
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
