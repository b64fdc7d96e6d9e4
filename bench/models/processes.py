"""A model on two processes over Gloo, with fully sharded parameters."""

from __future__ import annotations

import multiprocessing
import pathlib
import tempfile
from typing import Any

import torch

from .schemes import PROCESSES
from .training import Training

WORKS = "works"
SECONDS = 600


def verdict(error: Exception) -> str:
    """An error as a cell of the table."""
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line}".replace("|", "/")


def on_processes(training: Training) -> str:
    """A step, and `loss.backward()`: "works", or what went wrong on some rank.

    The processes are forked, so that they need not capture what this one has captured.
    """
    context = multiprocessing.get_context("fork")
    pipes = []
    with tempfile.TemporaryDirectory() as folder:
        store = (pathlib.Path(folder) / "store").as_uri()
        started = []
        for rank in range(PROCESSES.ranks):
            mine, theirs = context.Pipe(duplex=False)
            pipes.append(mine)
            given = rank, store, training, theirs
            started.append(context.Process(target=_rank, args=given, daemon=True))
            started[-1].start()
            theirs.close()  # so that recv fails when the process dies
        try:
            texts = [pipe.recv() if pipe.poll(SECONDS) else "silent" for pipe in pipes]
            for process in started:
                process.join(SECONDS)
        except EOFError:
            return "Error: a rank died"
        finally:
            for process in started:
                process.terminate()
    return max(texts, key=lambda text: text != WORKS)


def _rank(rank: int, store: str, training: Training, answer: Any) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=PROCESSES.ranks
    )
    try:
        training.stepped(PROCESSES)
        training.by_backward(PROCESSES)
    except Exception as error:  # the page says which
        answer.send(verdict(error))
    else:
        answer.send(WORKS)
    torch.distributed.destroy_process_group()
