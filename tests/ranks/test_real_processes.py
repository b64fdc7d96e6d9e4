"""Ranks that are threads of this process give what real processes give over Gloo, bit for bit."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks as run_processes
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from shardfn.ranks.run_ranks import run_ranks

ROWS, D, HIDDEN, STEPS = 12, 5, 8, 3
ADAM = functools.partial(torch.optim.AdamW, lr=0.01)
Values = list[torch.Tensor]


def model(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(HIDDEN) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(D, HIDDEN), middle, nn.Linear(HIDDEN, 3))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [
        (torch.randn(ROWS, D, generator=g), torch.randn(ROWS, 3, generator=g)) for _ in range(STEPS)
    ]


def own(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def local(x: Any) -> torch.Tensor:
    return (x.to_local() if isinstance(x, DTensor) else x).detach().clone()


def train(
    net: nn.Module,
    *,
    part: Callable[[torch.Tensor], torch.Tensor] = own,
    optimizer: Any = ADAM,
    microbatches: int = 1,
) -> Values:
    """Losses, gradients and parameters of three steps."""
    opt = optimizer(net.parameters())
    seen: Values = []
    for x, y in batches():
        pairs = [*zip(part(x).chunk(microbatches), part(y).chunk(microbatches), strict=True)]
        for i, (a, b) in enumerate(pairs):
            is_last = i == len(pairs) - 1
            no_sync = getattr(net, "no_sync", None)
            with contextlib.nullcontext() if is_last or no_sync is None else no_sync():
                out = net(a)
                loss = F.mse_loss(out.float(), b)
                loss.backward()
                seen.append(local(loss))
        seen += [local(p.grad) for p in net.parameters() if p.grad is not None]
        opt.step()
        opt.zero_grad()
    return [*seen, *map(local, net.parameters()), *map(local, net.buffers())]


def ddp(**options: Any) -> Values:
    return train(DistributedDataParallel(model(), **options))


def ddp_accumulates() -> Values:
    return train(DistributedDataParallel(model()), microbatches=2)


def ddp_hook(hook: Any, state: Any = None) -> Values:
    net = DistributedDataParallel(model())
    net.register_comm_hook(state() if state else None, hook)
    return train(net)


def power_sgd() -> Any:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)


def averaged(tensor: torch.Tensor) -> Any:
    future = dist.all_reduce(tensor, async_op=True).get_future()
    return future.then(lambda done: done.value()[0] / dist.get_world_size())


python_hook = lambda _, bucket: averaged(bucket.buffer())  # DDP reads annotations of a hook


def ddp_buffers() -> Values:
    return train(DistributedDataParallel(model(norm=True)))


def sharded_optimizer() -> Values:
    make = functools.partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW, lr=0.01)
    return train(DistributedDataParallel(model()), optimizer=make)


def fsdp(shape: tuple[int, ...] = (), **options: Any) -> Values:
    shape = shape or (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    net = model()
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh, **options)
    return train(fully_shard(net, mesh=mesh, **options))


def hybrid() -> Values:
    return fsdp((dist.get_world_size() // 2, 2))


def half() -> Values:
    return fsdp(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def tensor_parallel() -> Values:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return train(parallelize_module(model(), mesh, plan), part=lambda x: x)


def two_axes() -> Values:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    net = parallelize_module(model(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    dp = mesh["dp"]
    return train(fully_shard(net, mesh=dp), part=lambda x: x.chunk(dp.size())[dp.get_local_rank()])


class OwnRows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return own(x)


def sequence_parallel() -> Values:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    layers = (nn.LayerNorm(D), nn.Linear(D, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, 3))
    net = nn.Sequential(OwnRows(), *layers)
    plan = {
        "1": SequenceParallel(sequence_dim=0),
        "2": ColwiseParallel(input_layouts=Shard(0)),
        "4": RowwiseParallel(),
    }
    return train(parallelize_module(net, mesh, plan), part=lambda x: x)


def dtensors() -> Values:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    (x, y), *_ = batches()
    a = distribute_tensor(x, mesh, [Shard(0)])
    w = distribute_tensor(y.T @ x, mesh, [Shard(0)]).requires_grad_()
    out = (a.redistribute(placements=[Replicate()]) @ w.T).softmax(-1).sum(0)
    out.redistribute(placements=[Replicate()]).pow(2).sum().backward()
    return [local(out), local(w.grad), local(a.mean(0).full_tensor())]


def by_hand() -> Values:
    """Every collective, on sizes that no rank divides."""
    rank, n = dist.get_rank(), dist.get_world_size()
    x = torch.randn(1_003, generator=torch.Generator().manual_seed(rank))
    seen: Values = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        y = x.clone()
        work = dist.all_reduce(y, op, async_op=True)
        work.wait()
        seen.append(y)
    total = x.clone()
    dist.reduce(total, 1)
    seen.append(total if rank == 1 else torch.zeros(1))  # Gloo leaves parts of sums elsewhere
    y = x.clone()
    dist.broadcast(y, n - 1)
    outs = [torch.empty_like(x) for _ in range(n)]
    dist.all_gather(outs, x)
    gathered = [torch.empty_like(x) for _ in range(n)] if rank == 0 else None
    dist.gather(x, gathered)
    out = torch.empty(3)
    dist.scatter(out, [*torch.arange(3.0 * n).split(3)] if rank == 1 else None, src=1)
    rows = torch.randn(n * 5, generator=torch.Generator().manual_seed(7 + rank))
    part, whole = torch.empty(5), torch.empty(n * 5)
    dist.reduce_scatter_tensor(part, rows)
    dist.all_gather_into_tensor(whole, part)
    swapped = torch.empty(n * 5)
    dist.all_to_all_single(swapped, rows)
    uneven = torch.empty(n * (rank + 1))
    dist.all_to_all_single(
        uneven, torch.arange(sum(range(1, n + 1)) * 1.0), [rank + 1] * n, [*range(1, n + 1)]
    )
    sent = dist.isend(x, (rank + 1) % n)
    came = torch.empty_like(x)
    dist.recv(came, (rank - 1) % n)
    sent.wait()
    objects: list[Any] = [None] * n
    dist.all_gather_object(objects, {"rank": rank})
    group = dist.new_group([0, 1])
    pair = x.clone()
    if rank < 2:
        dist.all_reduce(pair, group=group)
    dist.barrier()
    ids = torch.tensor([each["rank"] for each in objects])
    found = [*seen, y, *outs, *(gathered or []), out, part, whole, swapped, uneven, came, ids, pair]
    return [*found]


CASES: dict[str, Callable[[], Values]] = {
    "DDP": ddp,
    "views of buckets": functools.partial(ddp, gradient_as_bucket_view=True),
    "small buckets": functools.partial(ddp, bucket_cap_mb=1e-4),
    "unused parameters": functools.partial(ddp, find_unused_parameters=True),
    "static graph": functools.partial(ddp, static_graph=True),
    "no_sync": ddp_accumulates,
    "half precision hook": functools.partial(ddp_hook, default_hooks.fp16_compress_hook),
    "hook of Python": functools.partial(ddp_hook, python_hook),
    "PowerSGD": functools.partial(ddp_hook, powerSGD_hook.powerSGD_hook, power_sgd),
    "buffers": ddp_buffers,
    "ZeroRedundancyOptimizer": sharded_optimizer,
    "FSDP2": fsdp,
    "kept parameters": functools.partial(fsdp, reshard_after_forward=False),
    "HSDP": hybrid,
    "mixed precision": half,
    "tensor parallel": tensor_parallel,
    "FSDP2 and tensor parallel": two_axes,
    "sequence parallel": sequence_parallel,
    "DTensors": dtensors,
    "by hand": by_hand,
}


def every_case() -> dict[str, Values]:
    return {name: case() for name, case in CASES.items()}


@pytest.fixture(scope="module", params=[2, 4])
def real(request: pytest.FixtureRequest) -> list[dict[str, Values]]:
    return run_processes(request.param, every_case)


@pytest.mark.parametrize("name", CASES)
def test_simulated_ranks_equal_processes(name: str, real: list[dict[str, Values]]) -> None:
    found = run_ranks(lambda _: CASES[name](), len(real), name=name)
    for mine, theirs in zip(found, real, strict=True):
        assert len(mine) == len(theirs[name]) > 0
        for i, (x, y) in enumerate(zip(mine, theirs[name], strict=True)):
            assert torch.equal(x, y), f"value {i}: {(x - y).abs().max()}"
