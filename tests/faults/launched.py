"""Processes of a job that a launcher has started: they have torch's variables and no process
group. What each came to is a text.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from tests.support.ranks import _place, _serve

Variables = dict[str, str]


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def variables(n: int, port: int, **others: str) -> list[Variables]:
    """What a launcher sets for n processes of this machine."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(n), **others}
    return [{**common, "RANK": str(rank)} for rank in range(n)]


def outcomes(
    ranks: list[Variables], fn: Callable[..., Any], *args: Any, seconds: float = 60
) -> list[str]:
    """The outcome of `fn(rank, *args)` in a process for each rank: the text of its result, or
    the class and text of its error, or the signal that ended it, or "hangs".

    Args:
        ranks: the variables of each process.
        fn: a function of a module.
        args: its further arguments.
        seconds: after which a process that is still at work is ended.
    """
    _serve()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(k)) for k in range(len(ranks))]
        context = mp.get_context("forkserver")
        processes = [
            context.Process(target=_process, args=(str(file), row, _place(), fn, args))
            for file, row in zip(files, ranks, strict=True)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + seconds
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0))
        found = [_outcome(process, file) for process, file in zip(processes, files, strict=True)]
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        return found


def _outcome(process: Any, file: Path) -> str:
    if process.is_alive():
        return "hangs"
    if file.exists():
        return file.read_text()
    code = process.exitcode or 0
    return signal.Signals(-code).name if code < 0 else f"exit {code}"


def _process(
    file: str, row: Variables, place: str | None, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import shardfn

    assert shardfn.__file__ == place, (shardfn.__file__, place)
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", **row})
    torch.set_num_threads(1)
    try:
        text = f"{fn(int(row['RANK']), *args)}"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    Path(f"{file}.part").write_text(text)
    Path(f"{file}.part").rename(file)
    os._exit(0)  # as in ranks.py
