"""A job that is interrupted, terminated or killed leaves no process, no socket and no temporary
file.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P
from tests.faults.launched import Variables, free_port, variables
from tests.support.ranks import _place, _serve

SECONDS = 120  # within which a loaded machine has started the ranks, and ended them
LISTENS = "0A"


def _rank(row: Variables, folder: str, place: str | None, started: Any) -> None:
    assert sf.__file__ == place
    os.setsid()  # whatever this process starts is of its session
    # A shell starts what runs in its background with interrupts ignored, and children inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(row)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TMPDIR=f"{folder}/tmp")
    os.environ["SHARDFN_CACHE_DIR"] = f"{folder}/cache"
    tempfile.tempdir = None
    torch.set_num_threads(1)
    mesh = sf.make_mesh((2,), ("dp",), timeout=10)
    loss = lambda w, x: (x @ w).square().sum()
    step = sf.shard(sf.grad(loss), mesh, (P(), P("dp")), backend="aten")
    w, x = torch.ones(3, 2), torch.ones(5, 3)
    sf.save(f"{folder}/saved", {"w": sf.full(step(w, x))})
    started.send(os.getpid())
    while True:
        step(w, x)


def _sessions() -> dict[int, int]:
    """The session of each process that has not ended, by its id."""
    sessions = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = file.read_text().rsplit(")", 1)[1].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            sessions[int(file.parent.name)] = int(session)
    return sessions


def _listening() -> set[int]:
    """The ports on which some process listens."""
    ports = set()
    for name in ("tcp", "tcp6"):
        file = Path("/proc/net", name)
        rows = file.read_text().splitlines()[1:] if file.exists() else []
        for row in rows:
            _, local, _, state, *_ = row.split()
            if state == LISTENS:
                ports.add(int(local.rsplit(":", 1)[1], 16))
    return ports


def _files(folder: Path) -> set[str]:
    return {str(file) for file in folder.rglob("*") if file.is_file()}


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize(
    ("sent", "to"),
    [
        (signal.SIGINT, (0, 1)),
        (signal.SIGTERM, (0, 1)),
        (signal.SIGKILL, (0, 1)),
        (signal.SIGKILL, (1,)),
    ],
)
def test_a_job_leaves_nothing(sent: signal.Signals, to: tuple[int, ...], tmp_path: Path) -> None:
    _serve()
    (tmp_path / "tmp").mkdir()
    port = free_port()
    context = multiprocessing.get_context("forkserver")
    shared_before = set(os.listdir("/dev/shm"))
    pipes, processes = [], []
    for row in variables(2, port):
        here, there = context.Pipe()
        args = (row, str(tmp_path), _place(), there)
        processes.append(context.Process(target=_rank, args=args))
        pipes.append(here)
    for process in processes:
        process.start()
    try:
        assert all(pipe.poll(SECONDS) for pipe in pipes)
        ids = [pipe.recv() for pipe in pipes]
        assert port in _listening()
        saved = _files(tmp_path)
        for rank in to:
            with contextlib.suppress(ProcessLookupError):  # it missed the other one
                os.kill(ids[rank], sent)
        for process in processes:
            process.join(SECONDS)
        assert all(process.exitcode for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert not [pid for pid, session in _sessions().items() if session in ids]
    assert port not in _listening()
    assert _files(tmp_path) == saved
    assert not _files(tmp_path / "tmp")
    left = set(os.listdir("/dev/shm")) - shared_before
    assert not [name for name in left if any(str(pid) in name for pid in ids)]
