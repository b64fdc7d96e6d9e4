"""Run a function on n real ranks: gloo processes on this machine, one thread each."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(n: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """The result of `fn(*args)` on each of n ranks; a rank's failure is raised here with its traceback."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (n, folder, fn, args), nprocs=n, join=True)
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(n)]


def _rank(rank: int, n: int, folder: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", n), rank=rank, world_size=n)
    torch.save(fn(*args), f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)  # Gloo's threads may outlive the group, and abort a process that is tidying up (torch 2.13)
