"""Stores of a job and the timeouts of groups, in one process."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardfn as sf
from shardfn import _compat
from shardfn._compat.distributed import stores
from tests.faults.launched import free_port


def test_a_key_that_does_not_come_in_time_is_told() -> None:
    store = _compat.own_store()
    assert not stores.has_come(store, "a", 0.02)
    store.set("a", "x")
    assert stores.has_come(store, "a", 0.02)


def test_other_errors_of_a_store_are_its_own() -> None:
    class Lost:
        def wait(self, keys: Any, timeout: timedelta) -> None:
            raise dist.DistStoreError("connection reset")

    with pytest.raises(dist.DistStoreError, match="connection reset"):
        stores.has_come(Lost(), "a", 0.02)


def test_keys_of_prefixed_stores_are_apart() -> None:
    store = _compat.own_store()
    one, two = stores.prefixed("one", store), stores.prefixed("two", store)
    one.set("k", "1")
    two.set("k", "2")
    assert (one.get("k"), two.get("k")) == (b"1", b"2")
    assert store.get("one/k") == b"1"


def test_clients_of_an_address_share_the_store() -> None:
    port = free_port()
    server = stores.tcp_store("127.0.0.1", port, True, 5)
    client = stores.tcp_store("127.0.0.1", port, False, 5)
    server.set("k", "x")
    assert client.get("k") == b"x"


def test_a_timeout_is_that_of_groups_made_in_this_thread_and_context() -> None:
    asked = lambda: torch.distributed.distributed_c10d._get_default_timeout("gloo")
    before, others = asked(), []
    with stores.groups_time_out(7):
        assert asked() == timedelta(seconds=7)
        thread = threading.Thread(target=lambda: others.append(asked()))
        thread.start()
        thread.join()
    assert asked() == before
    assert others and others[0] in (before, timedelta(seconds=7))


def test_groups_of_a_world_in_one_process_have_no_timeout() -> None:
    with sf.fake_world(2):
        assert stores.timeout_of(dist.group.WORLD) is None


def test_the_timeout_of_a_group_can_be_changed() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert stores.world_store() is not None
        stores.set_timeout(group, 11)
        assert stores.timeout_of(group) == 11.0
    finally:
        dist.destroy_process_group()
