"""Processes that do not find each other say why within their timeout: the address, who is here,
who is missing. Meshes are the same on all ranks, and all groups have one timeout.
"""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardfn as sf
from shardfn import P, _compat
from shardfn.jobs import environment, rendezvous
from tests.faults.launched import free_port, outcomes, variables

HERE = socket.gethostname()


def place(rank: int, size: int, port: int, host: str = "127.0.0.1") -> Any:
    return environment.Launch(host, port, rank, size, rank == 0, "0")


def refused(*args: Any) -> str:
    with pytest.raises(sf.RendezvousError) as error:
        rendezvous.met(*args)
    return str(error.value)


def test_nobody_listens() -> None:
    port = free_port()
    assert refused(place(1, 2, port), 0.5) == (
        "make_mesh, rendezvous: no process listens at this address after 0.5 s\n  address "
        f"127.0.0.1:{port}\n  here: rank 1 of 2, on {HERE}\n  missing: rank 0\n  try: start "
        "rank 0 on the host that MASTER_ADDR names"
    )


def test_no_such_host() -> None:
    text = refused(place(1, 2, 29_500, "no.such.host.invalid"), 0.3)
    assert "no host is called 'no.such.host.invalid'" in text
    assert "try: set MASTER_ADDR to the name or the address of rank 0's host" in text


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        text = refused(place(0, 2, port), 1)
        assert f"another process uses port {port}" in text
        assert "try: set another MASTER_PORT, or use torchrun --standalone" in text
        # the others of this job meet a program that is no store, and says nothing
        text = refused(place(1, 2, port), 1)
        assert "the process that listens there is not torch's store: no answer within 1 s" in text


def test_fewer_processes_than_the_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "GRACE", 0.0)
    port = free_port()
    assert refused(place(0, 5, port), 0.5) == (
        "make_mesh, rendezvous: 1 of 5 processes came within 0.5 s\n  address "
        f"127.0.0.1:{port}\n  here: rank 0, on {HERE}\n  missing: ranks 1, 2, 3, 4\n  try: set "
        "WORLD_SIZE to the number of started processes; read the first error of the missing "
        "ranks; or raise make_mesh(..., timeout=)"
    )


def together(*launches: Any) -> list[str]:
    """What several places of one job come to, in threads."""
    found: dict[int, str] = {}
    stores = []  # rank 0 serves the others as long as it has its own

    def run(k: int, launch: Any) -> None:
        try:
            stores.append(rendezvous.met(launch, 20.0))
            found[k] = "met"
        except sf.ShardError as error:
            found[k] = str(error)

    threads = [threading.Thread(target=run, args=row) for row in enumerate(launches)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[k] for k in range(len(launches))]


@pytest.fixture
def one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stand for processes that each join for the first time."""
    monkeypatch.setattr(rendezvous, "_joins", iter(lambda: 0, 1))


@pytest.mark.usefixtures("one_number")
def test_all_who_come_meet() -> None:
    port = free_port()
    assert together(*(place(r, 3, port) for r in range(3))) == ["met"] * 3


@pytest.mark.usefixtures("one_number")
def test_two_processes_of_one_rank() -> None:
    port = free_port()
    texts = together(place(0, 2, port), place(1, 2, port), place(1, 2, port))
    assert texts[0] == "met"
    (twice,) = (text for text in texts if text != "met")
    assert "two processes are rank 1" in twice
    assert "try: set a different RANK for each process" in twice


@pytest.mark.usefixtures("one_number")
def test_world_sizes_that_differ() -> None:
    port = free_port()
    texts = together(place(0, 2, port), place(1, 3, port), place(2, 3, port))
    assert "WORLD_SIZE is 2 on rank 0, 3 on rank 1" in texts[0]


def _meshes(rank: int) -> str:
    """What one of four processes sees."""
    begin = time.monotonic()
    mesh = sf.make_mesh((2, 2), ("a", "b"), timeout=timedelta(seconds=31))
    groups = [dist.group.WORLD, *mesh.get_all_groups()]
    assert [_compat.timeout_of(g) for g in groups] == [31.0] * 3
    f = sf.shard(lambda x: (x * x).sum(), mesh, (P("a", "b"),), backend="aten")
    x = torch.arange(15.0).reshape(3, 5)
    assert sf.full(f(x)) == (x * x).sum()
    assert time.monotonic() - begin < 30
    shape = (2, 2) if rank < 3 else (4, 1)
    text = ""
    try:
        sf.make_mesh(shape, ("a", "b"))
    except sf.DivergenceError as error:
        text = str(error)
    # a rank that does not call make_mesh is named by those that do
    if rank < 3:
        try:
            sf.make_mesh((4,), ("a",), timeout=0.5)
        except sf.RendezvousError as error:
            text += f"\n{error}"
    _compat.world_store().set(f"done {rank}", "")
    _compat.world_store().wait([f"done {r}" for r in range(4)])
    return text


def test_four_processes_join_by_torchs_variables_and_compare_their_meshes() -> None:
    texts = outcomes(variables(4, free_port()), _meshes)
    differ = (
        "make_mesh: ranks differ\n  rank 0: shape (2, 2), axis names ('a', 'b'), device cpu, "
        "links None\n  rank 3: shape (4, 1), axis names ('a', 'b'), device cpu, links None\n  "
        "try: pass the same arguments on every rank"
    )
    waited = "\nmake_mesh: rank 0 waited 0.5 s for the other ranks\n  missing: rank 3"
    assert texts[3] == differ
    assert texts[0].startswith(differ + waited)
