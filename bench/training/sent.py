"""What a training step sends on two ranks, next to DDP and FSDP2. `make bench-sent`."""

from __future__ import annotations

import os
import pathlib
import tempfile
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

import shardfn as sf
from shardfn import P

RANKS, FEATURES, HIDDEN = 2, 64, 128
KINDS = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
}
OURS = ("ddp", "zero1", "zero2", "zero3")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(FEATURES)
        self.up = nn.Linear(FEATURES, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, FEATURES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def model() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Linear(FEATURES, FEATURES, bias=False)
    return nn.Sequential(first, Block(), Block())


def batch() -> torch.Tensor:
    return torch.ones(32, 4, FEATURES)


class Sent(TorchDispatchMode):
    """Counts the bytes of the global tensor of each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _, _, name = func.name().partition("c10d::")
        if name in KINDS:
            leaves = _pytree.tree_leaves((args, kwargs))
            sizes = [x.nbytes for x in leaves if isinstance(x, torch.Tensor)]
            self.bytes[KINDS[name]] += max(sizes)
        return func(*args, **(kwargs or {}))


def ddp(_: Any) -> Counter[str]:
    """The bytes of a step of DDP, whose reducer hands its buckets to a hook."""
    sent = Counter[str]()
    wrapped = DistributedDataParallel(model())

    def hook(state: Any, bucket):  # DDP wants real types
        sent["all_reduce"] += bucket.buffer().nbytes
        return default_hooks.allreduce_hook(state, bucket)

    wrapped.register_comm_hook(None, hook)
    trained(wrapped)
    sent.clear()
    trained(wrapped)
    return sent


def fsdp2(mesh: Any) -> Counter[str]:
    """The bytes of a step of FSDP2."""
    wrapped = model()
    for layer in wrapped.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(wrapped, mesh=mesh)
    trained(wrapped)
    with Sent() as sent:
        trained(wrapped)
    return sent.bytes


def trained(module: nn.Module) -> None:
    """One step."""
    optimizer = torch.optim.AdamW(module.parameters())
    module(batch().chunk(RANKS)[dist.get_rank()]).square().mean().backward()
    optimizer.step()


def ours(name: str) -> Counter[str]:
    """The bytes of a step of a strategy."""
    fn, params, buffers = sf.functionalize(model())
    opt = sf.optim(torch.optim.AdamW)
    with sf.fake_world(RANKS, numerics=False):
        mesh = sf.make_mesh((RANKS,), ("dp",))
        plan = sf.strategy(name, params, mesh)
        state = opt.state_placements(plan.state, params)

        def step(params: Any, state: Any, x: torch.Tensor) -> Any:
            loss_fn = lambda p, x: fn(p, buffers, x)[0].square().mean()
            loss, grads = sf.bucketed_grad(loss_fn)(params, x)
            grads = sf.constrain(grads, plan.grads)
            params, state = opt.update(params, grads, state)
            return params, state, loss

        ins, outs = (plan.params, state, plan.batch), (plan.params, state, P())
        train = sf.shard(step, mesh, ins, outs, backend="aten")
        lowered = train.lower(params, opt.init(params), batch())
    sent = Counter[str]()
    for c in lowered.collectives:
        sent[c.kind] += c.nbytes
    return sent


def _rank(rank: int, store: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    rows = {"DDP": ddp(mesh), "FSDP2": fsdp2(mesh)}
    if rank == 0:
        for name, sent in rows.items():
            report(name, sent)
    dist.barrier()
    dist.destroy_process_group()


def report(name: str, sent: Counter[str]) -> None:
    texts = [f"{kind} {size:,}" for kind, size in sorted(sent.items())]
    print(f"{name:8} {'; '.join(texts)}", flush=True)


def main() -> None:
    """Print the bytes of each."""
    size = sum(p.nbytes for p in model().parameters())
    print(f"parameters {size:,} bytes")
    with tempfile.TemporaryDirectory() as folder:
        store = (pathlib.Path(folder) / "store").as_uri()
        mp.spawn(_rank, (store,), RANKS)
    for name in OURS:
        report(name, ours(name))


if __name__ == "__main__":
    main()
