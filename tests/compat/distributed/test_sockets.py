"""The sockets of process groups are found, and shut down without those of anybody else."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest
import torch

from shardfn._compat import shut_down, sockets_noted, tells_of_ranks


def test_a_connection_that_is_shut_down_ends_a_wait() -> None:
    found = set[tuple[int, int]]()
    others = socket.socketpair()
    with sockets_noted(found):
        listener = socket.create_server(("127.0.0.1", 0))
        a = socket.create_connection(listener.getsockname())
        b, _ = listener.accept()
    assert {x.fileno() for x in (listener, a, b)} == {number for number, _ in found}
    store = SimpleNamespace(port=listener.getsockname()[1])
    shut_down(found, SimpleNamespace(underlying_store=store))  # left alone
    b.send(b"x")
    assert a.recv(1) == b"x"
    shut_down(found, None)
    assert a.recv(1) == b""
    others[0].send(b"x")
    assert others[1].recv(1) == b"x"
    socket.create_connection(listener.getsockname()).close()  # it listens as before
    for each in (listener, a, b, *others):
        each.close()
    shut_down(found, None)  # numbers of sockets that are closed are left alone


TOLD = "[/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer"


@pytest.mark.parametrize(
    ("error", "tells"),
    [
        (RuntimeError(TOLD), True),
        (torch.distributed.DistNetworkError("reset"), True),
        (RuntimeError("CUDA out of memory"), False),
        (ValueError(TOLD), False),
    ],
)
def test_errors_of_collectives_are_known(error: Exception, tells: bool) -> None:
    assert tells_of_ranks(error) == tells
