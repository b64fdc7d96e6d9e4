"""The job into which faults are injected: a few training steps on Gloo processes, a checkpoint in
the middle, its parameters compared with those of plain torch at the end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from torch.distributed.checkpoint import FileSystemWriter

import shardfn as sf
from shardfn import P
from shardfn._compat.distributed import checkpoint_files
from shardfn.runtime import agreement, dispatch
from shardfn.runtime.stages import compiling

STEPS, BATCH, WIDTH = 5, 8, 3
# moments at which an action may be taken
START, MET, CAPTURE, COMPILE, CALL, STEP, SAVE, LOAD = (
    "before the rendezvous",
    "after make_mesh",
    "in capture",
    "in compile",
    "in a warm call",
    "between two calls",
    "in a save",
    "in a load",
)
WARM = 2  # the step in which a call is warm


@attrs.frozen
class Fault:
    """One fault, and what must come of it.

    Args:
        what: the action, a key of ACTIONS or of CALLS.
        when: the moment.
        expected: the class of the error on the other ranks, or "right".
        size: the number of processes.
        ranks: those that have the fault.
        timeout: of make_mesh, in seconds.
        variables: the environment that all processes are given besides, `{port}` being free.
        own: the environment of the ranks with the fault.
        told: whether the ranks with the fault must raise the error, too.
    """

    what: str
    when: str
    expected: str
    size: int = 2
    ranks: tuple[int, ...] = (1,)
    timeout: float = 3.0
    variables: dict[str, str] = attrs.field(factory=dict)
    own: dict[str, str] = attrs.field(factory=dict)
    told: bool = False


class WentOnError(Exception):
    """An error that a rank catches, to go on."""


def _kill(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _raise() -> None:
    raise ValueError("a bad batch")


def _go_on() -> None:
    raise WentOnError


def _pause(seconds: float) -> Callable[[], None]:
    return lambda: time.sleep(seconds)


ACTIONS: dict[str, Callable[[], None]] = {
    "kill -9": _kill(signal.SIGKILL),
    "SIGTERM": _kill(signal.SIGTERM),
    "SIGSEGV": _kill(signal.SIGSEGV),
    "SIGSTOP": _kill(signal.SIGSTOP),
    "SIGINT": _kill(signal.SIGINT),
    "os._exit(3)": lambda: os._exit(3),
    "sys.exit(0)": lambda: sys.exit(0),
    "an exception": _raise,
    "an exception, caught; goes on": _go_on,
    "is late by 1 s": _pause(1.0),
    "is late by twice the timeout": _pause(6.0),
    "nothing": lambda: None,
}


class Job:
    """The state of one process of the job."""

    def __init__(self, rank: int, fault: Fault, folder: str) -> None:
        self.rank, self.fault, self.folder = rank, fault, Path(folder)
        self.has_fault = rank in fault.ranks
        self.is_armed = False
        self.mesh: Any = None

    def at(self, when: str) -> None:
        """Take the action of the fault, if this is its moment."""
        fault = self.fault
        is_due = self.has_fault and when == fault.when
        if when in (CALL, SAVE, LOAD):
            is_due &= self.is_armed
        if is_due and fault.what in ACTIONS:
            self.note()
            self.has_fault = False
            ACTIONS[fault.what]()

    def note(self) -> None:
        """Write down when the fault happens. All processes of a machine share this clock."""
        file = self.folder / f"fault {self.rank}"
        file.write_text(str(time.monotonic()))

    def around(self, fn: Callable[..., Any], when: str) -> Callable[..., Any]:
        """A function before which the moment is."""

        def called(*args: Any, **kwargs: Any) -> Any:
            self.at(when)
            return fn(*args, **kwargs)

        return called

    def install(self) -> None:
        """Put the moments into the stages of shardfn."""
        aten = compiling.BACKENDS["aten"]

        def compiled(*args: Any) -> Any:
            self.at(COMPILE)
            return self.around(aten(*args), CALL)

        dispatch.traced_for = self.around(dispatch.traced_for, CAPTURE)
        compiling.BACKENDS["aten"] = compiled
        FileSystemWriter.write_data = self.around(FileSystemWriter.write_data, SAVE)
        checkpoint_files.Items.fill = self.around(checkpoint_files.Items.fill, LOAD)

    def sharded(self, fn: Callable[..., Any], *inputs: Any) -> Any:
        """A function over the mesh, whose result is replicated."""
        return sf.shard(
            fn, mesh=self.mesh, in_placements=inputs, out_placements=P(), backend="aten"
        )


def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient is all-reduced."""
    return ((x @ w) ** 2).sum() / BATCH


def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """One step of gradient descent."""
    return w - 0.01 * sf.grad(loss)(w, x)


def norm(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Another program with a collective of the same size."""
    return w + 0.01 * (x.sum(0, keepdim=True).mT @ torch.ones(1, 1).double())


def batch(k: int) -> torch.Tensor:
    """The batch of a step."""
    generator = torch.Generator().manual_seed(k)
    return torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)


def run(rank: int, fault: Fault, folder: str) -> str:
    """Run the job. Returns "right" or "wrong"."""
    job = Job(rank, fault, folder)
    job.install()
    job.at(START)
    before = EARLY.get(fault.what)
    if before is not None and job.has_fault:
        before(job)
    shape = (fault.size,)
    if fault.what == "another mesh" and job.has_fault:
        job.note()
        shape = (1, fault.size)
    job.mesh = sf.make_mesh(shape, ("a", "b")[: len(shape)], timeout=fault.timeout)
    job.at(MET)
    w = torch.ones(WIDTH, 1, dtype=torch.float64)
    train = job.sharded(step, P(), P("a"))
    for k in range(STEPS):
        job.is_armed = k == WARM
        try:
            job.at(STEP if k == WARM else "")
            w = _stepped(job, train, w, k)
        except WentOnError:
            continue
        if "caught" in fault.what and fault.when == CALL:
            assert torch.allclose(sf.full(w), _expected(k + 1)), "a call returned wrong values"
        if k == WARM and fault.when in (SAVE, LOAD):
            x = sf.distribute(batch(k), job.mesh, P("a"))
            sf.save(job.folder / "steps", {"w": w, "x": x}, step=k)
            w = sf.load(job.folder / "steps", {"w": w, "x": x})["w"]
    return "right" if torch.allclose(sf.full(w), _expected()) else "wrong"


def _stepped(job: Job, train: Any, w: Any, k: int) -> Any:
    call = CALLS.get(job.fault.what)
    is_due = k == (0 if job.fault.when == CAPTURE else WARM)
    if call is None or not is_due or not job.has_fault:
        return train(w, batch(k))
    job.note()
    return call(job, train, w, batch(k))


def _expected(steps: int = STEPS) -> torch.Tensor:
    w = torch.ones(WIDTH, 1, dtype=torch.float64)
    for k in range(steps):
        w = step(w, batch(k))
    return w


def _other_versions(job: Job) -> None:
    job.note()
    agreement.VERSIONS = ("torch 1.0", *agreement.VERSIONS[1:])


def _local(job: Job, train: Any, w: Any, x: torch.Tensor) -> Any:
    """A call without the others: it has no collective, and is right."""
    sf.jit(step, backend="aten")(sf.full(w), x)
    return train(w, x)


def _other_first(job: Job, train: Any, w: Any, x: torch.Tensor) -> Any:
    return train(job.sharded(norm, P(), P("a"))(w, x), x)


def _with_constant(job: Job, train: Any, w: Any, x: torch.Tensor) -> Any:
    rate = 0.01 * (1 + job.rank)
    fn = lambda w, x: w - rate * sf.grad(loss)(w, x)
    return job.sharded(fn, P(), P("a"))(w, x)


def _with_closed_over(job: Job, train: Any, w: Any, x: torch.Tensor) -> Any:
    rate = torch.full((), 0.01 * (1 + job.rank), dtype=torch.float64)
    fn = lambda w, x: w - rate * sf.grad(loss)(w, x)
    return job.sharded(fn, P(), P("a"))(w, x)


def _in_background(job: Job, train: Any, w: Any, x: torch.Tensor) -> Any:
    thread = threading.Thread(target=train, args=(w, x))
    thread.start()
    thread.join()
    return train(w, x)


# what a rank calls in the place of train(w, x)
CALLS: dict[str, Callable[..., Any]] = {
    "skips a step": lambda job, train, w, x: w,
    "makes a step more": lambda job, train, w, x: train(train(w, x), x),
    "a smaller last batch": lambda job, train, w, x: train(w, x[:6]),
    "a batch of one row": lambda job, train, w, x: train(w, x[:1]),
    "a batch of another dtype": lambda job, train, w, x: train(w, x.float()),
    "another batch of the same shape": lambda job, train, w, x: train(w, x + 1),
    "other parameters": lambda job, train, w, x: train(sf.full(w) + 1, x),
    "another function": _other_first,
    "another constant": _with_constant,
    "another closed-over tensor": _with_closed_over,
    "a local call more": _local,
    "the call in another thread, twice": _in_background,
    "saves alone": lambda job, train, w, x: (sf.save(job.folder / "own", {"w": w}), train(w, x))[1],
    "makes a mesh more": lambda job, train, w, x: (
        sf.make_mesh((job.fault.size,), ("a",)),
        train(w, x),
    )[1],
    "reads a wrong path": lambda job, train, w, x: sf.load(job.folder / "nothing", {"w": w}),
    "a refused placement": lambda job, train, w, x: job.sharded(step, P("q"), P("a"))(w, x),
}
# what a rank does before it makes a mesh
EARLY: dict[str, Callable[[Job], None]] = {"other versions": _other_versions}
