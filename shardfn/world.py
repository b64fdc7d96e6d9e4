"""The world a program runs in: real ranks, or n ranks in this one process."""

from __future__ import annotations

import contextlib
import contextvars
import sys
from typing import Any

import attrs
import torch
import torch.distributed as dist

from . import _compat
from .errors import ShardError, problem

MAX_RANKS = 2**20


@attrs.frozen(eq=False, repr=False)
class World:
    """The ranks that take part.

    `kind` is real (process groups), simulated (all ranks here, true values) or fake (one rank here, no values).
    """

    kind: str
    size: int
    rank: int


_ALONE = World("real", 1, 0)
_current: contextvars.ContextVar[World | None] = contextvars.ContextVar("shardfn_world", default=None)
_real: dict[Any, World] = {}


def current_world() -> World:
    """The world here and now: a fake one, the initialised process group's, or one rank alone."""
    world = _current.get()
    if world is not None:
        return world
    if not dist.is_initialized():
        return _ALONE
    group = dist.group.WORLD
    if group not in _real:
        _real.clear()
        _real[group] = World("real", dist.get_world_size(), dist.get_rank())
    return _real[group]


def _is_count(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool)


class fake_world(contextlib.ContextDecorator):
    """Enter a world of n ranks in this one process; a context manager and a decorator.

    Args:
        n: number of ranks, 1 to 2**20.
        rank: the rank whose coordinates and local tensors this process shows.
        numerics: True simulates every rank with true values; False traces and compiles for `rank` alone, and reading a
            value raises `FakeValueError`.

    Raises:
        ShardError: n or rank out of range, or a process group exists already.

    Source: the fake process group of PyTorch PR 113314.

    Example:
        >>> with fake_world(8):
        ...     current_world().size
        8
    """

    def __init__(self, n: int, rank: int = 0, numerics: bool = True) -> None:
        if not _is_count(n) or not 1 <= n <= MAX_RANKS:
            raise ShardError(problem("fake_world", f"n is {n!r}", needed=f"1 to {MAX_RANKS} ranks"))
        if not _is_count(rank) or not 0 <= rank < n:
            raise ShardError(problem("fake_world", f"rank is {rank!r}", needed=f"0 to {n - 1}, in a world of {n}"))
        if not isinstance(numerics, bool):
            raise ShardError(problem("fake_world", f"numerics is {numerics!r}", needed="True or False"))
        self.world = World("simulated" if numerics else "fake", n, rank)
        self.undo: list[tuple[contextvars.Token[World | None], Any]] = []

    def _recreate_cm(self) -> fake_world:
        return fake_world(self.world.size, self.world.rank, self.world.kind == "simulated")

    def __enter__(self) -> World:
        if dist.is_initialized():
            fix = "leave the other fake_world first" if _current.get() else "drop fake_world: this process has real ranks"
            raise ShardError(problem("fake_world", f"a world of {dist.get_world_size()} ranks exists already", fix=fix), fix=fix)
        hook = sys.excepthook  # torch adds the rank to every traceback of a process with a group, and leaves it there
        dist.init_process_group("fake", store=_compat.fake_store(), rank=self.world.rank, world_size=self.world.size)
        self.undo.append((_current.set(self.world), hook))
        return self.world

    def __exit__(self, *exc: object) -> None:
        token, sys.excepthook = self.undo.pop()
        _current.reset(token)
        dist.destroy_process_group()


def join_world(device_type: str) -> None:
    """Initialise the process group if there is none: torchrun's, or one rank alone."""
    if dist.is_initialized():
        return
    backend = "nccl" if device_type == "cuda" else "gloo"
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def default_device_type() -> str:
    """The type of torch's default device."""
    return torch.get_default_device().type
