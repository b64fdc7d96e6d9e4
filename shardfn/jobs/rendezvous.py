"""Rendezvous: the processes of a job find each other at one address, within one timeout, or each
says who is here and who is missing.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .. import _compat
from ..errors import RendezvousError, listed
from ..extensions import DEFAULT_WAIT
from .beside import connections_noted
from .environment import Launch, launch

WHERE = "make_mesh, rendezvous"
SHOWN = 16  # hosts in an error
RETRY = 0.2  # seconds between two attempts at an address
PORT = "set another MASTER_PORT, or use torchrun --standalone, which finds a free port"
GRACE = 2.0  # seconds that the process with the store stays for the others to read it
_joins = itertools.count()  # how often this process has joined a job


def join(backend: str, seconds: float | None) -> None:
    """Initialise the process group: the launcher's, or that of a single rank.

    Args:
        backend: of the group.
        seconds: the timeout of the rendezvous and of the group. None for torch's.

    Raises:
        RendezvousError: the processes do not find each other.
    """
    given = launch()
    if given is None:
        store, rank, size = _compat.own_store(), 0, 1
    else:
        store, rank, size = (met(given, seconds or DEFAULT_WAIT), given.rank, given.size)
    timeout = None if seconds is None else timedelta(seconds=seconds)
    try:
        with connections_noted():
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timeout
            )
    except RuntimeError as error:
        raise _not_connecting(backend, rank, size, error) from error


def met(launch: Launch, seconds: float) -> Any:
    """The store of a job, when all of its processes are there.

    Args:
        launch: the place of this process.
        seconds: how long to wait for the others.

    Returns:
        The store.

    Raises:
        RendezvousError: says the address, who is here, and who is missing.
    """
    deadline = time.monotonic() + seconds + GRACE * launch.is_server
    store = _connected(launch, seconds)
    number = next(_joins)
    store = _compat.prefixed(f"shardfn/{launch.attempt}/{number}", store)
    try:
        if store.add(f"came {launch.rank}", 1) > 1:
            raise _twice(launch, json.loads(store.get(f"rank {launch.rank}")))
        store.set(f"rank {launch.rank}", json.dumps(_who(launch)))
        others = _gathered(launch, store, deadline, seconds)
    except torch.distributed.DistError as error:
        got = f"the job's store at {launch.address} no longer answers: {_first_line(error)}"
        fix = "read the error of the process that served the store, rank 0 or the launcher"
        raise RendezvousError.of(WHERE, got, fix=fix) from error
    _compare_sizes(launch, others)
    return store


def _who(launch: Launch) -> dict[str, Any]:
    """The description of this process, for the others."""
    return {"host": socket.gethostname(), "process": os.getpid(), "size": launch.size}


def _connected(launch: Launch, seconds: float) -> Any:
    """The store of the address. A socket tries the address first, since torch's own client waits
    for longer than it is told, and for ever where another program listens (torch 2.13).
    """
    deadline = time.monotonic() + seconds
    if not launch.is_server:
        _try_address(launch, deadline, seconds)
    found = queue.SimpleQueue[Any]()

    def connect() -> None:
        left = max(deadline - time.monotonic(), 1.0)
        try:
            found.put(_compat.tcp_store(launch.host, launch.port, launch.is_server, left))
        except Exception as error:
            found.put(error)

    threading.Thread(target=connect, daemon=True, name="shardfn joins").start()
    try:
        store = found.get(timeout=max(deadline - time.monotonic(), 1.0))
    except queue.Empty:
        got = f"the process that listens there is not torch's store: no answer within {seconds:g} s"
        raise _unconnected(launch, got, PORT) from None
    if isinstance(store, Exception):
        got, fix = _first_line(store), "MASTER_ADDR and MASTER_PORT"
        if "address already in use" in str(store).lower():
            got, fix = f"another process uses port {launch.port}", PORT
        raise _unconnected(launch, got, fix) from store
    return store


def _try_address(launch: Launch, deadline: float, seconds: float) -> None:
    """Wait until somebody listens at an address."""
    address = launch.host, launch.port
    while True:
        left = max(deadline - time.monotonic(), 0.1)
        try:
            socket.create_connection(address, timeout=left).close()
            return
        except socket.gaierror as error:
            got, cause = f"no host is called {launch.host!r}", error
            fix = "set MASTER_ADDR to the name or the address of rank 0's host"
        except OSError as error:
            got, cause = f"no process listens at this address after {seconds:g} s", error
            fix = "start rank 0 on the host that MASTER_ADDR names"
        if time.monotonic() + RETRY > deadline:
            raise _unconnected(launch, got, fix) from cause
        time.sleep(RETRY)


def _unconnected(launch: Launch, got: str, fix: str) -> RendezvousError:
    """The error for an address that gives no store."""
    here = f"here: rank {launch.rank} of {launch.size}, on {socket.gethostname()}"
    missing = [] if launch.rank == 0 else ["missing: rank 0"]
    lines = [got, f"address {launch.address}", here, *missing]
    return RendezvousError.of(WHERE, *lines, fix=fix)


def _gathered(
    launch: Launch, store: Any, deadline: float, seconds: float
) -> dict[int, dict[str, Any]]:
    """The descriptions of all processes."""
    keys = {rank: f"rank {rank}" for rank in range(launch.size)}
    for key in keys.values():
        left = max(deadline - time.monotonic(), 0.001)
        if not _compat.has_come(store, key, left):
            raise _missing(launch, store, seconds)
    return {rank: json.loads(store.get(key)) for rank, key in keys.items()}


def _missing(launch: Launch, store: Any, seconds: float) -> RendezvousError:
    ranks = range(launch.size)
    here = [rank for rank in ranks if store.check([f"rank {rank}"])]
    absent = [rank for rank in ranks if rank not in here]
    whos = [json.loads(store.get(f"rank {rank}")) for rank in here[:SHOWN]]
    hosts = ", ".join(sorted({who["host"] for who in whos}))
    fix = "set WORLD_SIZE to the number of started processes; "
    fix += "read the first error of the missing ranks; or raise make_mesh(..., timeout=)"
    return RendezvousError.of(
        WHERE,
        f"{len(here)} of {launch.size} processes came within {seconds:g} s",
        f"address {launch.address}",
        f"here: {listed(here)}, on {hosts}",
        f"missing: {listed(absent)}",
        fix=fix,
    )


def _twice(launch: Launch, other: dict[str, Any]) -> RendezvousError:
    return RendezvousError.of(
        WHERE,
        f"two processes are rank {launch.rank}",
        f"address {launch.address}",
        f"process {other['process']} on {other['host']}, and "
        f"process {os.getpid()} on {socket.gethostname()}",
        fix="set a different RANK for each process, and a different MASTER_PORT for each job",
    )


def _compare_sizes(launch: Launch, others: dict[int, dict[str, Any]]) -> None:
    sizes = {rank: who["size"] for rank, who in others.items()}
    rank = next((r for r, n in sizes.items() if n != launch.size), None)
    if rank is None:
        return
    got = f"WORLD_SIZE is {launch.size} on rank {launch.rank}, {sizes[rank]} on rank {rank}"
    fix = "one WORLD_SIZE for all processes"
    raise RendezvousError.of(WHERE, got, fix=fix)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _not_connecting(backend: str, rank: int, size: int, error: Exception) -> RendezvousError:
    """The error for processes that have met and cannot connect to each other."""
    got = f"rank {rank} of {size} cannot connect by {backend}: {_first_line(error)}"
    fix = (
        "read the first error of the other ranks; or set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME "
        "to "
    )
    fix += "the network interface that the hosts share"
    return RendezvousError.of(WHERE, got, fix=fix)
