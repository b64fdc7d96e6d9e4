"""Run a function on n real ranks: gloo processes on this machine, one thread each.

One server process lives as long as the pytest worker. It has imported torch and shardfn, and
called them (tests/runtime/warm.py), and forks the ranks of every world: a rank starts at once, and
holds no state of an earlier test.

Gloo now and then writes into memory it has freed: of 12,000 worlds of plain torch 2.13 (two
processes, twenty all-reduces, reduce-scatters and all-gathers each, nothing of ours) two died
of "malloc(): unaligned fastbin chunk detected" and its like. So ranks that die by such a signal
run once more, with a warning; whatever they raise, or die of again, is raised here.

Ranks that wait for each other for good end after LIMIT, and the test shows where each one stood.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import multiprocessing
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# What the server imports; the ranks share the pages.
IMPORTED_ONCE = [
    "torch",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "hypothesis",
    "numpy",
    "pytest",
    "runtime.warm",
]
CRASHES = {-signal.SIGABRT, -signal.SIGSEGV}
LIMIT = 600.0  # seconds


def run_ranks(n: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """The result of `fn(*args)` on each of n ranks; a rank's failure is raised here with its
    traceback.
    """
    try:
        return _forked(n, fn, args)
    except CrashedError as crash:
        warnings.warn(f"{crash}; they run once more: {getattr(fn, '__name__', fn)}", stacklevel=2)
    return _forked(n, fn, args)


class CrashedError(RuntimeError):
    """A rank died by a signal, not by an exception of its own."""


def _forked(n: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    _serve()
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.start_processes(
            _rank,
            (n, folder, LIMIT, dict(os.environ), _place(), fn, args),
            nprocs=n,
            join=False,
            start_method="forkserver",
        )
        try:
            while not ranks.join():
                pass
        except (
            mp.ProcessExitedException,
            mp.ProcessRaisedException,
        ) as error:  # whichever rank was seen first
            died = [
                rank for rank, process in enumerate(ranks.processes) if process.exitcode in CRASHES
            ]
            if died:
                raise CrashedError(f"ranks {died} of {n} crashed") from error
            stacks = [file.read_text() for file in sorted(Path(folder).glob("*.stacks"))]
            if any(stacks):
                raise TimeoutError("\n".join(stacks)) from error
            raise
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(n)]


def _serve() -> None:
    """Start the server, if none is there. It imports from where this process does."""
    multiprocessing.set_forkserver_preload(IMPORTED_ONCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()


def _place() -> str | None:
    """The file of the package under test."""
    spec = importlib.util.find_spec("shardfn")
    return spec.origin if spec else None


def _rank(
    rank: int,
    n: int,
    folder: str,
    limit: float,
    environment: dict[str, str],
    place: str | None,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    imported = sys.modules.get("shardfn")
    if imported is not None and imported.__file__ != place:
        raise RuntimeError(
            f"the ranks' server imported {imported.__file__}, and the tests {place}: "
            "set PYTHONPATH to the folder of the tests' shardfn"
        )
    # The server has the environment of its own start, not of this test.
    os.environ.clear()
    os.environ.update(environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    with Path(folder, f"{rank}.stacks").open("w") as stacks:
        faulthandler.dump_traceback_later(limit, exit=True, file=stacks)
        dist.init_process_group(
            "gloo", store=dist.FileStore(f"{folder}/store", n), rank=rank, world_size=n
        )
        torch.save(fn(*args), f"{folder}/{rank}.pt")
        dist.barrier()
        faulthandler.cancel_dump_traceback_later()
    os._exit(
        0
    )  # Gloo's threads may outlive the group, and abort a process that is tidying up (torch 2.13)
