"""FSDP2: `fully_shard`, on one axis and on two."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from .data_parallel import ALL, MASK, X, Y, alone, clipped_alone, masked_alone, model
from .entries import Family, numbers, own

entry = Family()
PAIRS = {"replicas": 2, "shards": 2}


def sharded(mesh: DeviceMesh | None = None, out: int = 2) -> Any:
    m = model(out)
    fully_shard(m[0], mesh=mesh)
    fully_shard(m[2], mesh=mesh)
    return fully_shard(m, mesh=mesh)


def backward(m: nn.Module, x: Any, y: Any, mesh: DeviceMesh | None = None) -> Any:
    F.mse_loss(m(own(x, mesh)), own(y, mesh)).backward()
    return m


@entry(
    "pytorch/pytorch#118298", alone, X, Y,
    names=ALL, cause="missing on every rank: not computed, or not saved",
)  # fmt: skip
def gradients_stay_unsynchronised(faulty: bool, x: Any, y: Any) -> Any:
    m = sharded()
    m.set_requires_gradient_sync(not faulty)
    return backward(m, x, y)


@entry(
    "NVIDIA/cosmos-framework#162", alone, X, Y,
    names=ALL, cause="missing on every rank: not computed, or not saved", world=4, mesh=PAIRS,
)  # fmt: skip
def replicas_are_not_reduced(faulty: bool, x: Any, y: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    m = sharded(mesh)
    m.set_requires_all_reduce(not faulty)
    return backward(m, x, y)


@entry(
    "pytorch/pytorch#155903", alone, X, Y,
    names=ALL, ratio=2.0, cause="size of replicas or shards: reduced twice, or summed",
    world=4, mesh=PAIRS,
)  # fmt: skip
def the_divide_factor_is_that_of_one_axis(faulty: bool, x: Any, y: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    m = sharded(mesh)
    for layer in (m, m[0], m[2]):
        layer.set_gradient_divide_factor(2.0 if faulty else 4.0)
    return backward(m, x, y)


@entry(
    "NVIDIA-NeMo/Automodel#3830, one of two factors", alone, X, Y,
    names=ALL, ratio=4.0, cause="size of world: reduced twice, or summed", world=4,
)  # fmt: skip
def the_loss_is_multiplied_by_the_ranks(faulty: bool, x: Any, y: Any) -> Any:
    m = sharded()
    loss = F.mse_loss(m(own(x)), own(y))
    (loss * dist.get_world_size() if faulty else loss).backward()
    return m


class Embedded(nn.Module):
    """Layers with parameters of the outermost module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 3, dtype=torch.float64))
        self.layers = nn.ModuleList([nn.Linear(3, 3).double(), nn.Linear(3, 2).double()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def embedded_alone(x: torch.Tensor, y: torch.Tensor) -> Any:
    m = Embedded()
    F.mse_loss(m(x), y).backward()
    return m


@entry(
    "mindspore-ai/hyper-parallel#279", embedded_alone, X, Y,
    names="scale", cause="each rank its own: not reduced over world",
)  # fmt: skip
def parameters_of_the_root_are_not_sharded(faulty: bool, x: Any, y: Any) -> Any:
    m = Embedded()
    for layer in m.layers:
        fully_shard(layer)
    return backward(m if faulty else fully_shard(m), x, y)


@entry(
    "pytorch/pytorch#170862", clipped_alone, X, numbers(8, 4, seed=2),
    names=ALL, cause="each rank another scale",
)  # fmt: skip
def the_norm_is_that_of_local_shards(faulty: bool, x: Any, y: Any) -> Any:
    m = backward(sharded(out=4), x, y)
    square = torch.stack([p.grad.to_local().norm() ** 2 for p in m.parameters()]).sum()
    if not faulty:
        dist.all_reduce(square)
    for p in m.parameters():
        p.grad.mul_((0.5 / (square.sqrt() + 1e-6)).clamp(max=1.0))
    return m


@entry(
    "ByteDance-Seed/VeOmni#184", clipped_alone, X, Y,
    names=ALL, ratio=2**-0.5, cause="the clipping norm", world=4, mesh=PAIRS,
)  # fmt: skip
def the_norm_counts_replicas(faulty: bool, x: Any, y: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    m = backward(sharded(mesh), x, y)
    square = torch.stack([p.grad.to_local().norm() ** 2 for p in m.parameters()]).sum()
    dist.all_reduce(square, group=None if faulty else mesh.get_group("shards"))
    for p in m.parameters():
        p.grad.mul_((0.5 / (square.sqrt() + 1e-6)).clamp(max=1.0))
    return m


@entry(
    "huggingface/transformers#46113", clipped_alone, X, Y,
    names=ALL, cause="the clipping norm",
)  # fmt: skip
def gradients_are_not_clipped(faulty: bool, x: Any, y: Any) -> Any:
    m = backward(sharded(), x, y)
    gradients = [p.grad for p in m.parameters()]
    norm = torch.nn.utils.get_total_norm(gradients)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    clipped = gradients if faulty else list(m.parameters())  # torch reads .grad of what it gets
    torch.nn.utils.clip_grads_with_norm_(clipped, 0.5, norm)
    return m


@entry(
    "PrimeIntellect-ai/prime-rl#1957", masked_alone, X, Y, MASK,
    names=ALL, ratio=1 / 2, cause="1 / size of world: divided once more",
)  # fmt: skip
def the_mean_of_the_reduction_is_not_undone(faulty: bool, x: Any, y: Any, mask: Any) -> Any:
    m, count = sharded(), mask.sum()
    loss = (((m(own(x)) - own(y)) ** 2).sum(1) * own(mask)).sum() / count
    (loss if faulty else loss * dist.get_world_size()).backward()
    return m


@entry(
    "meta-pytorch/torchtune#2687", alone, X, Y,
    names=ALL, ratio=2.0, cause="size of dp or tp: reduced twice, or summed",
    world=4, mesh={"dp": 2, "tp": 2},
)  # fmt: skip
def tokens_are_scaled_by_the_world_under_tensor_parallelism(faulty: bool, x: Any, y: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    m, dp = model(), mesh["dp"]
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    m: Any = fully_shard(parallelize_module(m, mesh["tp"], plan), mesh=dp)
    F.mse_loss(m(own(x, dp)), own(y, dp), reduction="sum").backward()
    scale = (dist.get_world_size() if faulty else dp.size()) / y.numel()
    for p in m.parameters():
        p.grad.mul_(scale)
    return m


@entry(
    "mindspore-ai/hyper-parallel#413", embedded_alone, X, Y,
    names="scale", ratio=2.0, cause="size of world: reduced twice",
)  # fmt: skip
def an_ignored_parameter_is_reduced_twice(faulty: bool, x: Any, y: Any) -> Any:
    m = Embedded()
    for layer in m.layers:
        fully_shard(layer)
    backward(fully_shard(m, ignored_params={m.scale}), x, y)
    dist.all_reduce(m.scale.grad, dist.ReduceOp.AVG)
    if faulty:
        dist.all_reduce(m.scale.grad)
    return m
