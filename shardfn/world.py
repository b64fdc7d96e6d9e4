"""`World` and `fake_world`: the ranks that a program runs on, either real processes or n simulated
ranks in one process.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import attrs
import torch
import torch.distributed as dist

from . import _compat
from .errors import DivergenceError, RendezvousError, ShardError, listed, warn
from .extensions import DEFAULT_WAIT, LAUNCHER, Eager, Job, Lane, service

MAX_RANKS = 2**20


@attrs.frozen(eq=False, repr=False)
class World:
    """The ranks that take part in a program.

    `kind` is real (process groups), simulated (all ranks in this process, with values) or fake (one
    rank in this process, without values).
    """

    kind: str
    size: int
    rank: int


@attrs.define(eq=False)
class _FakeWorldState:
    """The fake world of this process. It holds for every thread, as torch's process group does."""

    world: World | None = None
    by: fake_world | None = None
    is_open: bool = False  # whether `start` has entered it
    has_warned: bool = False  # of a launcher
    thread: str = ""  # the name of the thread that entered it
    torchs: contextlib.ExitStack = attrs.Factory(contextlib.ExitStack)  # torch, patched


_ALONE = World("real", 1, 0)
_entered = _FakeWorldState()
# one thread at a time enters or leaves; it may ask for the world meanwhile
_door = threading.RLock()
_groups: weakref.WeakKeyDictionary[World, Iterator[int]] = (
    weakref.WeakKeyDictionary()
)  # how often a world has made groups
# how often ranks have exchanged texts, by the name of their lane
_exchanges: dict[str, Iterator[int]] = {}
_real: dict[
    Any, tuple[World, int]
] = {}  # process group -> its world, and the id of the process that made it


def current_world() -> World:
    """Return the current world: a fake one, that of the initialised process group, or a single
    rank.

    Raises:
        ShardError: this process was forked from a rank of a world of several ranks, and shares
            its connections.
    """
    world = _entered.world
    if world is not None:
        return world
    if not dist.is_initialized():
        return _ALONE
    group = dist.group.WORLD
    world, process = _real.get(group) or _world_of_new_group(group)
    if world.size > 1 and process != os.getpid():
        raise _error_of_fork(world)
    return world


def _world_of_new_group(group: Any) -> tuple[World, int]:
    """Return the world of a process group at its first use. All threads get the same one."""
    with _door:
        if group not in _real:
            _real.clear()
            _real[group] = (World("real", dist.get_world_size(), dist.get_rank()), os.getpid())
        return _real[group]


def _error_of_fork(world: World) -> ShardError:
    """Build the error for a process that was forked from a rank."""
    fix = "use multiprocessing's spawn, or only plain tensors in the forked process"
    got = (
        f"the process was forked from rank {world.rank} of {world.size}, and cannot use that "
        "rank's connections"
    )
    return ShardError.of(
        "this process",
        got,
        needed="a process that was not forked from a rank, but connects to the ranks itself",
        fix=fix,
    )


def _is_count(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool)


class fake_world(contextlib.ContextDecorator):
    """Simulate a world of n ranks in this process, as a context manager or a decorator.

    A fake world belongs to the process, like torch's process group, and applies to all threads
    until one of the threads leaves it. Entering a second world at the same time raises an error.
    When a world ends, its meshes can no longer be used.

    Args:
        n: the number of ranks, from 1 to 2**20.
        rank: the simulated rank of this process: mesh coordinates and `DTensor.to_local()` are
            those of this rank.
        numerics: whether to compute the values of every rank. With `numerics=False`, shardfn
            captures and compiles for `rank` only, and reading a value raises a FakeValueError.
        unless_launched: whether to skip the simulation in a process that torchrun has started as
            one of several. With `unless_launched=True`, the same script runs on simulated ranks,
            or, under torchrun, on real ranks that `make_mesh` connects.

    Raises:
        ShardError: n or rank is out of range, or a process group exists already.

    Source: the fake process group of PyTorch PR 113314.

    Example:
        >>> with fake_world(8):
        ...     current_world().size
        8
    """

    def __init__(
        self, n: int, rank: int = 0, numerics: bool = True, *, unless_launched: bool = False
    ) -> None:
        if not _is_count(n) or not 1 <= n <= MAX_RANKS:
            raise ShardError.of("fake_world", f"n is {n!r}", needed=f"1 to {MAX_RANKS} ranks")
        if not _is_count(rank) or not 0 <= rank < n:
            raise ShardError.of(
                "fake_world", f"rank is {rank!r}", needed=f"0 to {n - 1}, in a world of {n}"
            )
        if not isinstance(numerics, bool):
            raise ShardError.of("fake_world", f"numerics is {numerics!r}", needed="True or False")
        if not isinstance(unless_launched, bool):
            got = f"unless_launched is {unless_launched!r}"
            raise ShardError.of("fake_world", got, needed="True or False")
        self.world = World("simulated" if numerics else "fake", n, rank)
        self.is_left_out = unless_launched and is_launched()

    def _recreate_cm(self) -> fake_world:
        again = fake_world(self.world.size, self.world.rank, self.world.kind == "simulated")
        again.is_left_out = self.is_left_out
        return again

    def __enter__(self) -> World:
        if self.is_left_out:
            return World("real", int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
        with _door:
            if dist.is_initialized():
                raise _error_of_second_world()
            _warn_of_launcher(self.world)
            if _entered.world is not None:
                _leave_fake_world()  # its process group was destroyed
            hook = sys.excepthook
            rank, size = self.world.rank, self.world.size
            with contextlib.ExitStack() as torchs:
                eager = service(Eager)
                if eager is not None:
                    torchs.enter_context(eager.world(self.world.kind == "simulated"))
                with _compat.patched("new world"):
                    dist.init_process_group(
                        "fake", store=_compat.fake_store(), rank=rank, world_size=size
                    )
                _entered.torchs = torchs.pop_all()
            sys.excepthook = hook  # torch adds the rank to every traceback
            _entered.thread = threading.current_thread().name
            _entered.by, _entered.is_open = self, False
            self.world = _entered.world = attrs.evolve(self.world)  # a world ends when it is left
        return self.world

    def start(self) -> fake_world:
        """Enter the fake world without a `with` statement, for example in a notebook. The process
        stays in the world until `stop` is called.

        Returns:
            The fake_world object.

        Raises:
            ShardError: a process group exists already.
        """
        self.__enter__()
        _entered.is_open = not self.is_left_out
        return self

    def stop(self) -> None:
        """Leave the fake world that `start` has entered. If the object that entered the world is no
        longer available, for example in a notebook, call `stop` on a new `fake_world` object with
        the same number of ranks.

        Raises:
            ShardError: no world was started, the world has another number of ranks, or a `with`
                statement has entered the world.
        """
        if self.is_left_out:
            return
        with _door:
            _refuse_stop(self.world.size)
            _leave_fake_world()

    def __exit__(self, *exc: object) -> None:
        if self.is_left_out:
            return
        with _door:
            if _entered.by is not self:
                fix = f"`with fake_world({self.world.size}):` around the code that needs it"
                got = "the world is left, but was not entered or was already left"
                raise ShardError.of("fake_world", got, fix=fix)
            _leave_fake_world()

    def __repr__(self) -> str:
        world = self.world
        numerics = "" if world.kind == "simulated" else ", numerics=False"
        return f"fake_world({world.size}, rank={world.rank}{numerics})"


@contextlib.contextmanager
def world_set_aside() -> Iterator[None]:
    """Leave the current world inside a context, so that a fake world can be entered there. The
    current one, with its meshes and process groups, comes back afterwards.
    """
    if not dist.is_initialized():
        yield
        return
    names = [field.name for field in attrs.fields(_FakeWorldState)]
    outer = {name: getattr(_entered, name) for name in names}
    _entered.world = _entered.by = None
    _entered.torchs = contextlib.ExitStack()
    try:
        with _compat.groups_set_aside():
            yield
    finally:
        for name, value in outer.items():
            setattr(_entered, name, value)


def _warn_of_launcher(world: World) -> None:
    """Warn once, on rank 0, that each process of a job simulates all ranks."""
    if _entered.has_warned or not is_launched() or os.environ.get("RANK") != "0":
        return
    _entered.has_warned = True
    text = (
        f"fake_world({world.size}) in a job of {os.environ['WORLD_SIZE']} processes: each "
        f"process simulates all {world.size} ranks; fake_world({world.size}, "
        "unless_launched=True) does nothing under torchrun, so that ranks are real"
    )
    warn(text)


def _leave_fake_world() -> None:
    """Leave the fake world, and destroy its process group."""
    _entered.torchs.close()
    _entered.world = _entered.by = None
    if dist.is_initialized():
        dist.destroy_process_group()
    _compat.shardings_forgotten()


def _refuse_stop(size: int) -> None:
    """Refuse to leave a world that `start` has not entered.

    Raises:
        ShardError: there is none of this size.
    """
    by = _entered.by
    if by is None:
        got = "stop() was called on a world that was not started or was already stopped"
        fix = "world = sf.fake_world(n); world.start(); and later world.stop()"
    elif not _entered.is_open:
        got = "stop() was called on a world that a `with` block has entered"
        fix = "end the `with` block, which leaves the world"
    elif by.world.size != size:
        own = by.world.size
        got = f"stop() was called on a world of {size} ranks, but the started world has {own} ranks"
        fix = f"sf.fake_world({by.world.size}).stop()"
    else:
        return
    raise ShardError.of("fake_world", got, fix=fix)


def _error_of_second_world() -> ShardError:
    """Build the error for a world inside another, entered by the same thread or by another one."""
    got = f"a world of {dist.get_world_size()} ranks exists already"
    fix = "remove fake_world, since this process has real ranks"
    if is_alone():
        got = "torch.distributed is already initialized, with a process group of one rank"
        fix = (
            "enter fake_world before the first mesh, or call "
            "torch.distributed.destroy_process_group()"
        )
    if _entered.world is not None:
        size = _entered.world.size
        fix = "leave the other fake_world first: "
        fix += f"sf.fake_world({size}).stop()" if _entered.is_open else "the end of its `with`"
        if _entered.thread != threading.current_thread().name:
            got = f"{got}, entered in thread {_entered.thread}"
            fix = "use one fake_world around all threads, which share the process group"
    return ShardError.of("fake_world", got, fix=fix)


def is_launched() -> bool:
    """Whether a launcher has started this process as one of several."""
    return all(map(os.environ.get, LAUNCHER)) and os.environ["WORLD_SIZE"] != "1"


def is_alone() -> bool:
    """Return whether this process is no part of a job, nor of a world of several ranks."""
    return current_world().size == 1 and not is_launched()


def join_world(device_type: str, seconds: float | None = None) -> None:
    """Initialise the process group if there is none: the launcher's, or that of a single rank.

    Args:
        device_type: whose backend the group has.
        seconds: the timeout of the rendezvous and of the group. None for torch's.

    Raises:
        RendezvousError: the processes do not find each other.
    """
    if dist.is_initialized():
        return
    backend = "nccl" if device_type == "cuda" else "gloo"
    job = service(Job)
    join = _join_by_torch if job is None else job.join
    join(backend, seconds)
    atexit.register(leave_gloo)


def _join_by_torch(backend: str, seconds: float | None) -> None:
    timeout = None if seconds is None else timedelta(seconds=seconds)
    if all(map(os.environ.get, LAUNCHER)):
        dist.init_process_group(backend, timeout=timeout)
        return
    store = _compat.own_store()
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)


@contextlib.contextmanager
def groups_of(where: str, request: str, seconds: float | None) -> Iterator[None]:
    """Check that all processes make the same groups inside the context, and apply one timeout to
    them.

    Args:
        where: the function, which errors name.
        request: a description of the groups, which must be the same on all ranks.
        seconds: the timeout of the groups and of the world. None for that of the world.

    Raises:
        RendezvousError: a process does not come.
        DivergenceError: the processes ask for other groups.
    """
    world = current_world()
    if world.kind != "real" or world.size == 1:
        yield
        return
    group = dist.group.WORLD
    if seconds is not None:
        _compat.set_timeout(group, seconds)
    limit = seconds or _compat.timeout_of(group) or DEFAULT_WAIT
    number = next(_groups.setdefault(world, itertools.count()))
    ranks, prefix = (world.rank, world.size), f"shardfn/{where}/{number}"
    job = service(Job)
    if job is not None:
        job.watch(world, limit)
    compare(where, _compat.world_store(), prefix, ranks, request, limit)
    connecting = contextlib.nullcontext() if job is None else job.connecting()
    with _compat.patched("new groups", seconds=limit), connecting:
        yield


def compare(
    where: str, store: Any, prefix: str, ranks: tuple[int, int], mine: str, seconds: float
) -> None:
    """Check over the store that all processes have the same text.

    Args:
        where: the function, which errors name.
        store: the store of the job.
        prefix: of the keys of this comparison.
        ranks: the rank of this process, and the number of ranks.
        mine: the text of this process.
        seconds: how long to wait for the others.

    Raises:
        RendezvousError: names the ranks that do not come.
        DivergenceError: quotes rank 0 and the first rank that differs.
    """
    rank, size = ranks
    store.set(f"{prefix}/{rank}", mine)
    deadline = time.monotonic() + seconds
    keys = [f"{prefix}/{r}" for r in range(size)]
    for key in keys:
        if not _compat.has_come(store, key, max(deadline - time.monotonic(), 0.001)):
            absent = [r for r in range(size) if not store.check([keys[r]])]
            got = f"rank {rank} waited {seconds:g} s for the other ranks"
            fix = (
                "make the same calls of make_mesh on all ranks; read the first error of the other "
                "ranks"
            )
            raise RendezvousError.of(where, got, f"missing: {listed(absent)}", fix=fix)
    texts = [store.get(key).decode() for key in keys]
    other = next((r for r, text in enumerate(texts) if text != texts[0]), None)
    if other is None:
        return
    lines = f"rank 0: {texts[0]}", f"rank {other}: {texts[other]}"
    fix = "pass the same arguments on every rank"
    raise DivergenceError.of(where, "ranks differ", *lines, fix=fix)


def texts_of_ranks(where: str, mine: str, lane: Lane | None = None) -> list[str]:
    """The texts of all ranks, by which they compare what they are about to run.

    Args:
        where: the function, which errors name.
        mine: the text of this rank.
        lane: the ranks of a mesh. None for all of the world.

    Returns:
        A text of each of these ranks, in order.

    Raises:
        RankLostError: a rank does not come.
        DivergenceError: a rank is in another call.
    """
    world = current_world()
    job = service(Job)
    if job is not None:
        return job.texts(world, where, mine, lane)
    name, ranks = lane or ("world", range(world.size))
    number = next(_exchanges.setdefault(name, itertools.count()))
    store = _compat.world_store()
    store.set(f"shardfn/texts/{name}/{number}/{world.rank}", mine)
    return [store.get(f"shardfn/texts/{name}/{number}/{rank}").decode() for rank in ranks]


def leave_gloo() -> None:
    """Leave the process group at exit, if it is Gloo's: its threads would go on to drop tensors
    when Python has ended (pytorch#179291). After an error they may wait for other ranks.
    """
    failed = getattr(sys, "last_value", None) is not None
    other = dist.is_initialized() and dist.get_backend() != "gloo"
    if not failed and not other:
        _real.clear()
        _compat.leave_groups()


def default_device_type() -> str:
    """Return the type of torch's default device."""
    return torch.get_default_device().type
