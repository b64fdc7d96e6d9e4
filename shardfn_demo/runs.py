"""The same training run in three worlds: one device, eight simulated ranks, two real processes."""

from __future__ import annotations

import collections
import datetime
import itertools
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import spawn

import shardfn as sf
from shardfn import P
from shardfn.world import leave_gloo
from shardfn_demo import adamw, gpt, text, train

Progress = Callable[[float], object]

SIMULATED, REAL = {"dp": 2, "tp": 4}, {"dp": 2, "tp": 1}
PATIENCE = datetime.timedelta(minutes=10)  # one rank's wait for another, which may be compiling
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@attrs.frozen(kw_only=True)
class Job:
    """The training job that every world computes.

    Args:
        config: the model's sizes.
        steps: training steps.
        batch: windows in a step, over all ranks.
        lr: learning rate.
        seed: of the parameters, of the choice of text and of dropout.
        dtype: of the parameters.
    """

    config: gpt.Config = gpt.Config(dropout=0.1)
    steps: int = train.STEPS
    batch: int = train.BATCH
    lr: float = train.LR
    seed: int = 0
    dtype: torch.dtype = torch.float32


@attrs.frozen
class Traffic:
    """The collectives of one kind in one step of one rank.

    Args:
        kind: all_reduce, all_gather, reduce_scatter or all_to_all.
        count: how many.
        nbytes: their payload together, in bytes.
    """

    kind: str
    count: int
    nbytes: int


@attrs.frozen
class Run:
    """The results of one world.

    Args:
        name: of the world.
        losses: one for each step.
        first_call_seconds: the first step, with capture and compilation.
        seconds: the median of the other steps; of the first where there is no other.
        collectives: of one step, by kind.
        program: the text of one rank's program; empty where nothing was sharded.
    """

    name: str
    losses: tuple[float, ...]
    first_call_seconds: float
    seconds: float
    collectives: tuple[Traffic, ...] = ()
    program: str = ""


def one_device(job: Job, progress: Progress) -> Run:
    """The oracle: the same pure step in eager PyTorch, differentiated by torch.func, on one device.

    Args:
        job: what to compute.
        progress: told the loss after each step.

    Returns:
        The run.
    """
    params = gpt.init(job.config, seed=job.seed, dtype=job.dtype)
    step = train.step(job.config, job.lr, train.plain_value_and_grad)
    step = sf.random.plain()(step)  # the numbers that the sharded steps draw
    return timed("one device", step, job, params, adamw.init(params), progress)


def simulated(job: Job, progress: Progress) -> Run:
    """Eight ranks in this process, each with its true values.

    Args:
        job: what to compute.
        progress: told the loss after each step.

    Returns:
        The run, with the program of one rank.
    """
    with sf.fake_world(8):
        return sharded("8 simulated ranks", SIMULATED, job, progress, backend="aten")


def processes(job: Job, progress: Progress, *, backend: str = "inductor") -> Run:
    """Two real processes on this machine, joined by Gloo over the loopback device.

    Args:
        job: what to compute.
        progress: told the loss after each step.
        backend: inductor or aten.

    Returns:
        The run as rank 0 saw it.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed; the text holds its traceback.
    """
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = (pathlib.Path(folder) / "store").as_uri()
        context = spawn(rank_main, (store, job, backend, results), nprocs=2, join=False)
        assert context is not None, "spawn was called with join=False"
        try:
            received, ended = [], False
            while not ended:
                ended = context.join(
                    timeout=0.1
                )  # raises what a rank raised, after ending the other
                received += drained(results, progress)
        finally:
            stop(context.processes)
    return received[-1]


def rank_main(rank: int, store: str, job: Job, backend: str, results: Any) -> None:
    """One of the real processes: join the group, train, leave. Rank 0 sends its losses and, at
    the end, its run.

    Args:
        rank: 0 or 1.
        store: the URL of the file through which the ranks meet.
        job: what to compute.
        backend: inductor or aten.
        results: the queue to the parent.
    """
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=PATIENCE)
    tell = results.put if rank == 0 else lambda said: None
    tell(sharded("2 Gloo processes", REAL, job, tell, backend=backend))
    dist.barrier()
    leave_gloo()


def drained(results: Any, progress: Progress) -> list[Run]:
    """Pass the losses that have arrived to `progress`. Returns the run if it has arrived."""
    runs = []
    while not results.empty():
        said = results.get()
        if isinstance(said, Run):
            runs.append(said)
        else:
            progress(said)
    return runs


def stop(processes: Iterable[Any]) -> None:
    """End the processes that are still alive, after an error or an interrupt."""
    for process in processes:
        if process.is_alive():
            process.terminate()
        process.join()


def sharded(name: str, axes: dict[str, int], job: Job, progress: Progress, *, backend: str) -> Run:
    """Train on a mesh over the current world: batch over "dp", heads, features and vocabulary
    over "tp".
    """
    mesh = sf.make_mesh(tuple(axes.values()), tuple(axes), device_type="cpu")
    params = gpt.init(job.config, seed=job.seed, dtype=job.dtype)
    state = adamw.init(params)
    where = gpt.placements(params)
    where_state = {"step": P(), "m": where, "v": where}
    step = sf.shard(
        train.step(job.config, job.lr),
        mesh,
        in_placements=(where, where_state, P("dp"), P("dp")),
        out_placements=(where, where_state, P()),
        backend=backend,
    )
    params, state = (sf.distribute(params, mesh, where), sf.distribute(state, mesh, where_state))
    run = timed(name, step, job, params, state, progress)
    lowered = step.lower(params, state, *next(batches(job)))
    return attrs.evolve(run, collectives=by_kind(lowered.collectives), program=lowered.text())


def timed(
    name: str, step: train.Step, job: Job, params: Any, state: Any, progress: Progress
) -> Run:
    """Train from the job's random state, and note when each step ended."""
    sf.random.state.seed(job.seed)
    ends = [time.perf_counter()]

    def ended(loss: float) -> None:
        ends.append(time.perf_counter())
        progress(loss)

    losses = train.train(step, params, state, batches(job), steps=job.steps, progress=ended)
    first, *others = (after - before for before, after in itertools.pairwise(ends))
    return Run(name, tuple(losses), first, statistics.median(others or [first]))


def batches(job: Job) -> train.Batches:
    """The text of the job, the same in every world."""
    return text.batches(text.corpus(), batch=job.batch, context=job.config.context, seed=job.seed)


def by_kind(collectives: Iterable[Any]) -> tuple[Traffic, ...]:
    """Count collectives and add up their bytes, by kind."""
    sizes = collections.defaultdict(list)
    for one in collectives:
        sizes[one.kind].append(one.nbytes)
    return tuple(Traffic(kind, len(sizes[kind]), sum(sizes[kind])) for kind in sorted(sizes))
