"""Who is timed by `bench.buckets`: whole training steps on two real ranks, through shardfn, DDP
and FSDP.
"""

from __future__ import annotations

import datetime
import logging
import os
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardfn as sf
from bench import slow_link
from bench.bucket_jobs import JOBS, RANKS, Job, named, trained
from shardfn import P
from shardfn.runtime import cache
from shardfn_demo.runs import LOOPBACK

SHARDFN, SHARDFN_SMALL, SHARDFN_ALONE = (
    "shardfn",
    "shardfn, 4 MB buckets",
    "shardfn, no communication",
)
DDP, DDP_SMALL, DDP_VIEWS = (
    "DDP eager",
    "DDP eager, 4 MB buckets",
    "DDP eager, gradients as views",
)
DDP_COMPILED, DDP_ALL_COMPILED = ("DDP compiled", "DDP and optimizer compiled, views")
ALONE, ALONE_COMPILED, ALONE_ALL_COMPILED = (
    "modules, eager",
    "modules, compiled",
    "modules and optimizer compiled",
)
FSDP, FSDP_COMPILED = "FSDP2 eager", "FSDP2 compiled"
SMALL = 4  # MB of a small bucket

CHECKED = 3  # steps before the parameters are compared
TOLERANCE = 1e-3  # of how far each parameter has come since the start, in norm
PATIENCE = datetime.timedelta(minutes=10)  # one rank's wait for another, which may be compiling


@attrs.frozen(kw_only=True)
class Rival:
    """One way to train, ready to run.

    Args:
        step: forward, backward, reduction and update; keeps the parameters for the next.
        params: the whole parameters as they are now, by name; None if it trains nothing.
        alone: whether the ranks train on their own, each on its rows.
        compiled: whether its first step has something compiled.
        sent: bytes of each collective, if they are known before it runs.
    """

    step: Callable[[], Any]
    params: Callable[[], dict[str, Tensor]] | None = None
    alone: bool = False
    compiled: bool = True
    sent: tuple[int, ...] = ()


def shardfn_rival(job: Job, rank: int, *, alone: bool = False, **caps: str) -> Rival:
    """The step through `bucketed_grad`; on its own, over a mesh axis of one rank, where
    collectives are taken out.
    """
    axis, mesh = mesh_of(alone)
    loss_fn, params, update, state = written(job)
    loss_and_grads = sf.bucketed_grad(loss_fn, **caps)

    def step(params: Any, state: Any, x: Tensor, y: Tensor) -> Any:
        loss, grads = loss_and_grads(params, x, y)
        return *update(params, grads, state), loss

    placements = (P(), P(), P(axis), P(axis))
    train = sf.shard(step, mesh, placements, donate_argnums=(0, 1))
    held = list(sf.distribute((sf.tree_map(torch.clone, params), state), mesh, P()))
    batch = [sf.from_local(rows, mesh, P(axis)) for rows in job.rows(rank)]
    collectives = train.lower(*held, *batch).collectives
    assert bool(collectives) != alone, collectives

    def run() -> None:
        *held[:], _ = train(*held, *batch)

    return Rival(
        step=run,
        params=lambda: dict(named(sf.full(held[0]))),
        alone=alone,
        sent=tuple(c.nbytes for c in collectives),
    )


def written(job: Job) -> tuple[Any, Any, Any, Any]:
    """What shardfn trains: the loss (params, x, y), the parameters, the update (params, grads,
    state) -> (params, state), and the optimizer's first state.
    """
    if job.optimizer is None:
        descend = lambda p, g: p - job.lr * g
        update = lambda params, grads, state: (sf.tree_map(descend, params, grads), state)
        return job.loss, job.params, update, {}
    fn, params, buffers = sf.functionalize(job.module(job.params))
    opt = sf.optim(job.optimizer, lr=job.lr)
    loss_fn = lambda params, x, y: fn(params, buffers, x, y)[0]
    return loss_fn, params, opt.update, opt.init(params)


def mesh_of(alone: bool) -> tuple[str, Any]:
    """The axis that cuts the batch, and its mesh; alone, each rank is that axis, and holds a
    batch of its own.
    """
    if alone:
        return "alone", sf.make_mesh((RANKS, 1), ("other", "alone"), "cpu")
    return "dp", sf.make_mesh((RANKS,), ("dp",), "cpu")


def prefix_rival(job: Job, rank: int, first: int) -> Rival:
    """The step without communication, cut off when the gradients of the layers from `first` on
    are there.

    It returns a row of each: whole gradients would need memory that the step itself does not
    ask for.
    """
    axis, mesh = mesh_of(True)
    head, tail = job.params["layers"][:first], job.params["layers"][first:]

    def loss(tail: Any, head: Any, x: Tensor, y: Tensor) -> Tensor:
        return job.loss({"layers": [*head, *tail]}, x, y)

    def prefix(tail: Any, head: Any, x: Tensor, y: Tensor) -> Any:
        value, grads = (
            sf.value_and_grad(loss)(tail, head, x, y) if tail else (loss(tail, head, x, y), [])
        )
        return value, sf.tree_map(lambda g: g[:1], grads)

    cut = sf.shard(prefix, mesh, (P(), P(), P(axis), P(axis)))
    args = [sf.distribute(layers, mesh, P()) for layers in (tail, head)] + [
        sf.from_local(x, mesh, P(axis)) for x in job.rows(rank)
    ]
    assert not cut.lower(*args).collectives
    return Rival(step=lambda: cut(*args), alone=True)


def module_rival(
    job: Job,
    rank: int,
    wrap: Callable[[nn.Module], nn.Module] | None,
    *,
    compiled: bool = False,
    compiled_update: bool = False,
) -> Rival:
    """The step through modules, autograd and an optimizer, as torch's tutorials write it.

    Args:
        job: what to train.
        rank: whose rows.
        wrap: makes DDP or FSDP of the module; None: each rank trains on its own.
        compiled: whether `torch.compile` gets the wrapped module.
        compiled_update: whether it gets the optimizer too.
    """
    module = owned(job.module(job.params))
    model = wrap(module) if wrap else module
    optimizer = job.torchs(module)
    forward = torch.compile(model, dynamic=False) if compiled else model
    update = torch.compile(optimizer.step, dynamic=False) if compiled_update else optimizer.step
    x, y = job.rows(rank)

    def run() -> None:
        forward(x, y).backward()
        update()
        optimizer.zero_grad()

    def params() -> dict[str, Tensor]:
        return {name: sf.full(p.detach()) for name, p in module.named_parameters()}

    return Rival(step=run, params=params, alone=wrap is None, compiled=compiled)


def owned(module: nn.Module) -> nn.Module:
    """The module with a `forward` of its own: Dynamo's cache hangs on the code, and no rival is
    to search another's.
    """
    forward = type(module).forward
    copy = types.FunctionType(forward.__code__.replace(), forward.__globals__, forward.__name__)
    module.__class__ = type(type(module).__name__, (type(module),), {"forward": copy})
    return module


def ddp(module: nn.Module) -> nn.Module:
    """DDP as it comes."""
    return DistributedDataParallel(module)


def ddp_small(module: nn.Module) -> nn.Module:
    """DDP with small buckets."""
    return DistributedDataParallel(module, bucket_cap_mb=SMALL)


def ddp_views(module: nn.Module) -> nn.Module:
    """DDP without the copies from buckets to gradients."""
    return DistributedDataParallel(module, gradient_as_bucket_view=True)


def fsdp(module: nn.Module) -> nn.Module:
    """Each layer sharded, then what is left."""
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in module.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def field(job: Job, rank: int) -> Iterator[tuple[str, Rival]]:
    """Everyone who races, made one after the other, in the same order on both ranks."""
    yield SHARDFN, shardfn_rival(job, rank)
    yield (SHARDFN_SMALL, shardfn_rival(job, rank, cap=f"{SMALL}MB", first_cap="1MB"))
    yield SHARDFN_ALONE, shardfn_rival(job, rank, alone=True)
    yield DDP, module_rival(job, rank, ddp)
    yield DDP_SMALL, module_rival(job, rank, ddp_small)
    yield DDP_VIEWS, module_rival(job, rank, ddp_views)
    yield ALONE, module_rival(job, rank, None)
    yield DDP_COMPILED, module_rival(job, rank, ddp, compiled=True)
    yield ALONE_COMPILED, module_rival(job, rank, None, compiled=True)
    yield (
        DDP_ALL_COMPILED,
        module_rival(job, rank, ddp_views, compiled=True, compiled_update=True),
    )
    yield (ALONE_ALL_COMPILED, module_rival(job, rank, None, compiled=True, compiled_update=True))
    yield FSDP, module_rival(job, rank, fsdp)
    yield FSDP_COMPILED, module_rival(job, rank, fsdp, compiled=True)


def slow_field(job: Job, rank: int) -> Iterator[tuple[str, Rival]]:
    """Who runs on the slow link, and the prefixes of the step that say when each layer's
    gradients are ready.
    """
    yield SHARDFN, shardfn_rival(job, rank)
    yield (SHARDFN_SMALL, shardfn_rival(job, rank, cap=f"{SMALL}MB", first_cap="1MB"))
    yield SHARDFN_ALONE, shardfn_rival(job, rank, alone=True)
    yield DDP_SMALL, module_rival(job, rank, ddp_small)
    yield ALONE, module_rival(job, rank, None)
    for first in range(len(job.params["layers"]) + 1):
        yield prefix_name(first), prefix_rival(job, rank, first)


def prefix_name(first: int) -> str:
    """What a prefix is called."""
    return f"gradients of the layers from {first} on"


def rank_process(rank: int, store: str, job: str, slow: bool, pipe: Any) -> None:
    """One of two real ranks, which does as the conductor says: times a rival, sets the link, ends.

    Args:
        rank: 0 or 1.
        store: the URL of the file through which the ranks meet.
        job: a key of `JOBS`.
        slow: whether collectives go over a slow link.
        pipe: the connection to the conductor.
    """
    torch.set_num_threads(1)
    torch._logging.set_logs(
        all=logging.ERROR
    )  # Dynamo warns that it leaves out the optimizer's profiler record
    warnings.filterwarnings(
        "ignore", ".*are computed replicated"
    )  # by those who train alone, on purpose
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    link = slow_link.register()
    dist.init_process_group(
        slow_link.NAME if slow else "gloo",
        init_method=store,
        rank=rank,
        world_size=RANKS,
        timeout=PATIENCE,
    )
    known = ready(JOBS[job](), rank, slow_field if slow else field)
    compiled = compilations()
    pipe.send({name: rival.sent for name, rival in known.items()})
    while (asked := pipe.recv()) is not None:
        if isinstance(asked, tuple):
            name, steps, warm = asked
            pipe.send(timed(known[name].step, steps, warm))
        else:
            link.latency, link.bandwidth = asked.latency, asked.bandwidth
    pipe.send(compilations() - compiled)
    dist.barrier()
    os._exit(
        0
    )  # Gloo's threads may outlive the group, and abort a process that is tidying up (torch 2.13)


def ready(
    job: Job, rank: int, rivals: Callable[[Job, int], Iterator[tuple[str, Rival]]]
) -> dict[str, Rival]:
    """The rivals, compiled and found right.

    Raises:
        RuntimeError: one computes something else than one process does, or compiled nothing
            where it should.
    """
    known = {}
    for name, rival in rivals(job, rank):
        before = compilations()
        rival.step()
        if rival.compiled != (compilations() > before):
            raise RuntimeError(f"{name}: {compilations() - before} compilations at the first step")
        known[name] = rival
    expected = {
        alone: trained(job, *(job.rows(rank) if alone else (job.x, job.y)), CHECKED)
        for alone in (True, False)
    }
    for name, rival in known.items():  # not before all are made: one must not disturb another
        for _ in range(CHECKED - 1):
            rival.step()
        if rival.params is not None:
            check(name, job, rival.params(), expected[rival.alone])
    return known


def check(name: str, job: Job, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare parameters by how far they have come since the start."""
    for path, start in named(job.params):
        off = (found[path] - expected[path]).norm() / (expected[path] - start).norm()
        if not off <= TOLERANCE:
            raise RuntimeError(
                f"{name}: after {CHECKED} steps, {path} is off by {off:.1e} of its change"
            )


def compilations() -> int:
    """How often this process has captured or compiled a graph, for whomever."""
    return sum(cache.counts.values()) + counters["stats"]["unique_graphs"]


def timed(step: Callable[[], Any], steps: int, warm: int) -> list[float]:
    """Milliseconds of some steps that both ranks start together, after some that warm the
    caches.
    """
    times = []
    for _ in range(warm):
        step()
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    return times
