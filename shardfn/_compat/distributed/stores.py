"""torch's key-value stores, through which processes rendezvous, and timeouts of process groups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..threads import replaced

_c10d = torch.distributed.distributed_c10d
TORCH_VERSION = str(torch.__version__)


def tcp_store(host: str, port: int, is_server: bool, seconds: float) -> Any:
    """Connect to the TCPStore of an address; one process serves it."""
    return torch._C._distributed_c10d.TCPStore(
        host,
        port,
        is_master=is_server,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        multi_tenant=True,
    )


def prefixed(prefix: str, store: Any) -> Any:
    """Wrap a store so that its keys begin with a prefix."""
    return torch._C._distributed_c10d.PrefixStore(prefix, store)


def world_store() -> Any:
    """Return the store of the default process group."""
    return _c10d._get_default_store()


def has_come(store: Any, key: str, seconds: float) -> bool:
    """Wait for a key of a store. Returns whether it was set within these seconds."""
    try:
        store.wait([key], timedelta(seconds=seconds))
    except dist.DistStoreError as error:
        if "timeout" not in str(error).lower():
            raise
        return False
    return True


@contextlib.contextmanager
def groups_time_out(seconds: float) -> Iterator[None]:
    """Set the default timeout of new process groups."""
    timeout = timedelta(seconds=seconds)
    with replaced(_c10d, "_get_default_timeout", lambda _: lambda backend: timeout):
        yield


def timeout_of(group: Any) -> float | None:
    """Return the timeout of a process group in seconds. None for a backend without one."""
    for kind in group._device_types:
        options = getattr(group._get_backend(kind), "options", None)
        if options is not None:
            return options._timeout.total_seconds()
    return None


def device_of_group(group: Any) -> torch.device:
    """Return the device on which a process group exchanges objects."""
    return torch.device(_c10d._get_object_coll_device(group))


def set_timeout(group: Any, seconds: float) -> None:
    """Change the timeout of a process group."""
    _c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def another_client(store: Any, seconds: float) -> Any:
    """Open a second connection to a store, for another thread: a client serves one call at a
    time.

    Args:
        store: the store.
        seconds: how long its calls may wait.
    """
    client = store.clone()
    client.set_timeout(timedelta(seconds=seconds))
    return client


def put_first(store: Any, key: str, text: str) -> str:
    """Set a key of a store unless another process has set it. Returns the value that it has
    then.
    """
    return store.compare_set(key, "", text).decode()


def texts_of(store: Any, keys: list[str]) -> list[str | None]:
    """Read the values of keys in a store, None for those that are not set."""
    if not keys:
        return []
    there = [key for key in keys if store.check([key])]
    values = dict(zip(there, store.multi_get(there), strict=True)) if there else {}
    return [values[key].decode() if key in values else None for key in keys]
