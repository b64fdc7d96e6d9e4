"""DistributedDataParallel, and data parallelism by hand."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn as dist_nn
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from .entries import Family, numbers, own, reduced

entry = Family()
X, Y = numbers(8, 3), numbers(8, 2, seed=2)
MASK = torch.tensor([1, 1, 1, 0, 0, 1, 0, 0], dtype=torch.float64)  # 3 and 1 of two parts of 4
ALL = "0.weight 0.bias 2.weight 2.bias"


def model(out: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, out)).double()


def alone(x: torch.Tensor, y: torch.Tensor) -> Any:
    m = model()
    loss = F.mse_loss(m(x), y)
    loss.backward()
    return loss, m


def trained(m: nn.Module, x: torch.Tensor, y: torch.Tensor, lr: float = 0.1) -> Any:
    opt = torch.optim.SGD(m.parameters(), lr)
    loss = F.mse_loss(m(x), y)
    loss.backward()
    opt.step()
    return m, opt


def alone_trained(x: torch.Tensor, y: torch.Tensor) -> Any:
    return trained(model(), x, y)


@entry(
    "verl-SpeCo#29", alone_trained, X, Y,
    names=ALL, kind="parameter after the step", ratio=1 / 4, cause="learning rate divided",
    world=4,
)  # fmt: skip
def the_learning_rate_is_divided_by_the_world(faulty: bool, x: Any, y: Any) -> Any:
    lr = 0.1 / dist.get_world_size() if faulty else 0.1
    return trained(DistributedDataParallel(model()), own(x), own(y), lr)


@entry(
    "huggingface/transformers#35438", alone, X, Y,
    names=ALL, ratio=2.0, cause="x 2.0 on every rank = size of world",
)  # fmt: skip
def microbatches_are_summed(faulty: bool, x: Any, y: Any) -> Any:
    m = DistributedDataParallel(model())
    for i, (a, b) in enumerate(zip(own(x).chunk(2), own(y).chunk(2), strict=True)):
        with m.no_sync() if i == 0 else contextlib.nullcontext():
            loss = F.mse_loss(m(a), b)
            (loss if faulty else loss / 2).backward()
    return m


@entry(
    "huggingface/picotron#5", alone, X, Y,
    names=ALL, cause="each rank its own: not reduced over world",
)  # fmt: skip
def the_last_microbatch_is_not_synchronised(faulty: bool, x: Any, y: Any) -> Any:
    m = DistributedDataParallel(model())
    for i, (a, b) in enumerate(zip(own(x).chunk(2), own(y).chunk(2), strict=True)):
        with m.no_sync() if faulty or i == 0 else contextlib.nullcontext():
            (F.mse_loss(m(a), b) / 2).backward()
    return m


class WithUnused(nn.Module):
    """A module of which one part is not called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def unused_alone(x: torch.Tensor, y: torch.Tensor) -> Any:
    m = WithUnused()
    F.mse_loss(m(x), y).backward()
    return m


@entry(
    "pytorch/pytorch#128949", unused_alone, X, Y,
    names="used.weight used.bias", cause="each rank its own: not reduced over world",
)  # fmt: skip
def a_bucket_waits_for_unused_parameters(faulty: bool, x: Any, y: Any) -> Any:
    m = DistributedDataParallel(WithUnused(), find_unused_parameters=not faulty)
    F.mse_loss(m(own(x)), own(y)).backward()
    return m


def masked_alone(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> Any:
    m = model()
    (((m(x) - y) ** 2).sum(1) * mask).sum().div(mask.sum()).backward()
    return m


@entry(
    "PrimeIntellect-ai/prime-rl#2562", masked_alone, X, Y, MASK,
    names=ALL, cause="a mean of means: the losses of the ranks of world need the weights 3, 1",
)  # fmt: skip
def tokens_are_counted_by_each_rank(faulty: bool, x: Any, y: Any, mask: Any) -> Any:
    m, mask = DistributedDataParallel(model()), own(mask)
    count = mask.sum()
    if not faulty:
        dist.all_reduce(count, dist.ReduceOp.AVG)
    (((m(own(x)) - own(y)) ** 2).sum(1) * mask).sum().div(count).backward()
    return m


@entry(
    "facebookresearch/fairchem#269", alone, X[:7], Y[:7],
    names=ALL, cause="a mean of means: the losses of the ranks of world need the weights 4, 3",
)  # fmt: skip
def a_last_batch_is_shorter(faulty: bool, x: Any, y: Any) -> Any:
    m, rows = DistributedDataParallel(model()), len(own(x))
    loss = F.mse_loss(m(own(x)), own(y))
    (loss if faulty else loss * rows * dist.get_world_size() / len(x)).backward()
    return m


def clipped_alone(x: torch.Tensor, y: torch.Tensor) -> Any:
    m = model(y.shape[1])
    F.mse_loss(m(x), y).backward()
    nn.utils.clip_grad_norm_(m.parameters(), 0.5)
    return m


@entry(
    "huggingface/accelerate#641", clipped_alone, X, Y,
    names=ALL, cause="other values",
)  # fmt: skip
def gradients_are_clipped_before_they_are_reduced(faulty: bool, x: Any, y: Any) -> Any:
    m = model()
    F.mse_loss(m(own(x)), own(y)).backward()
    if faulty:
        nn.utils.clip_grad_norm_(m.parameters(), 0.5)
    reduced(m)
    if not faulty:
        nn.utils.clip_grad_norm_(m.parameters(), 0.5)
    return m


@entry(
    "modelscope/twinkle#290", clipped_alone, X, Y,
    names=ALL, ratio=2**-0.5, cause="the clipping norm",
)  # fmt: skip
def the_norm_is_summed_over_replicas(faulty: bool, x: Any, y: Any) -> Any:
    m = DistributedDataParallel(model())
    F.mse_loss(m(own(x)), own(y)).backward()
    square = torch.stack([p.grad.norm() ** 2 for p in m.parameters()]).sum()
    if faulty:
        dist.all_reduce(square)
    for p in m.parameters():
        p.grad.mul_((0.5 / (square.sqrt() + 1e-6)).clamp(max=1.0))
    return m


@entry(
    "NVIDIA-NeMo/Automodel#3830", alone, X, Y,
    names=ALL, ratio=4.0, cause="size of world: reduced twice, or summed", world=4,
)  # fmt: skip
def gradients_are_summed(faulty: bool, x: Any, y: Any) -> Any:
    m = model()
    F.mse_loss(m(own(x)), own(y)).backward()
    return reduced(m, dist.ReduceOp.SUM if faulty else dist.ReduceOp.AVG)


@entry(
    "meta-pytorch/torchtune#2172", alone, X, Y,
    names=ALL, ratio=1 / 2, cause="1 / size of world: divided once more",
)  # fmt: skip
def a_sum_over_tokens_is_averaged_over_ranks(faulty: bool, x: Any, y: Any) -> Any:
    m = DistributedDataParallel(model())
    F.mse_loss(m(own(x)), own(y), reduction="sum").backward()
    scale = (1 if faulty else dist.get_world_size()) / y.numel()
    for p in m.parameters():
        p.grad.mul_(scale)
    return m


@entry(
    "pytorch/torchtitan#3822", alone, X, Y,
    names="2.weight", ratio=2.0, cause="size of world: reduced twice",
)  # fmt: skip
def one_gradient_is_reduced_by_a_hook_too(faulty: bool, x: Any, y: Any) -> Any:
    m = DistributedDataParallel(model())
    F.mse_loss(m(own(x)), own(y)).backward()
    if faulty:
        dist.all_reduce(m.module[2].weight.grad)
    return m


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()


def normed_alone(x: torch.Tensor, y: torch.Tensor) -> Any:
    m = normed()
    F.mse_loss(m(x), y).backward()
    return m


@entry(
    "mindspore-ai/hyper-parallel#526", normed_alone, X, Y,
    names="1.weight 1.bias", cause="each rank its own: not reduced over world",
)  # fmt: skip
def ignored_parameters_are_not_reduced(faulty: bool, x: Any, y: Any) -> Any:
    m = normed()
    names = ["1.weight", "1.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(m, names if faulty else [])
    ddp = DistributedDataParallel(m)
    F.mse_loss(ddp(own(x)), own(y)).backward()
    return ddp


def contrastive(features: torch.Tensor) -> torch.Tensor:
    scores = features @ features.T
    return F.cross_entropy(scores, torch.arange(len(features)))


def contrastive_alone(x: torch.Tensor) -> Any:
    m = model()
    loss = contrastive(m(x))
    loss.backward()
    return loss, m


@entry(
    "JohnGiorgi/DeCLUTR#212", contrastive_alone, X,
    names=ALL, ratio=1 / 2, cause="1 / size of world: divided once more",
)  # fmt: skip
def a_gathered_batch_has_the_gradient_of_one_part(faulty: bool, x: Any) -> Any:
    m = DistributedDataParallel(model())
    features = m(own(x))
    parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, features.detach())
    parts[dist.get_rank()] = features
    loss = contrastive(torch.cat(parts))
    (loss if faulty else loss * dist.get_world_size()).backward()
    return loss, m


@entry(
    "mlfoundations/open_clip#616", contrastive_alone, X,
    names=ALL, ratio=2.0, cause="size of world: reduced twice, or summed",
)  # fmt: skip
def a_gather_with_gradients_sums_those_of_equal_losses(faulty: bool, x: Any) -> Any:
    m = model()
    loss = contrastive(torch.cat(dist_nn.all_gather(m(own(x)))))
    loss.backward()
    return loss, reduced(m, dist.ReduceOp.SUM if faulty else dist.ReduceOp.AVG)


@entry(
    "pytorch/pytorch#58005", alone, X, Y,
    names=ALL, ratio=2.0, cause="size of world: reduced twice",
)  # fmt: skip
def a_loss_that_is_reduced_with_its_gradient(faulty: bool, x: Any, y: Any) -> Any:
    m = DistributedDataParallel(model())
    loss = F.mse_loss(m(own(x)), own(y))
    if faulty:
        dist_nn.all_reduce(loss).backward()
    else:
        loss.backward()
    return m


@entry(
    "speechbrain/speechbrain#2814", alone, X, Y,
    names="0.weight 0.bias 2.weight 2.bias", kind="start", cause="starts with values",
)  # fmt: skip
def ranks_begin_with_parameters_of_their_own(faulty: bool, x: Any, y: Any) -> Any:
    m = model()
    if faulty:
        torch.manual_seed(dist.get_rank() + 7)
        for p in m.parameters():
            nn.init.normal_(p)
    F.mse_loss(m(own(x)), own(y)).backward()
    return reduced(m)


def with_statistics() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2)).double().eval()


def statistics_alone(x: torch.Tensor) -> Any:
    m = with_statistics()
    m[0].running_mean.lerp_(x.mean(0), 0.1)
    return m(x).mean(), m


@entry(
    "speechbrain/speechbrain#2814, input normalisation", statistics_alone, X,
    names="0.running_mean", kind="buffer", cause="each rank its own: not reduced over world",
)  # fmt: skip
def running_means_are_those_of_a_rank(faulty: bool, x: Any) -> Any:
    m = with_statistics()
    mean = own(x).mean(0)
    if not faulty:
        dist.all_reduce(mean, dist.ReduceOp.AVG)
    m[0].running_mean.lerp_(mean, 0.1)
    return m(own(x)).mean(), m


@entry(
    "NVIDIA-NeMo/Megatron-Bridge#4066", alone, X, Y,
    names="0.weight 0.bias", ratio=1 / 2, cause="1 / size of dp or tp: divided once more",
    world=4, mesh={"dp": 2, "tp": 2},
)  # fmt: skip
def an_encoder_is_divided_by_the_ranks_of_the_other_module(
    faulty: bool, x: Any, y: Any, mesh: DeviceMesh
) -> Any:
    m, dp = model(), mesh["dp"]
    F.mse_loss(m(own(x, dp)), own(y, dp)).backward()
    reduced(m, mesh=dp)
    if faulty:
        for p in m[0].parameters():
            p.grad.mul_(dp.size() / mesh.size())
    return m


@entry(
    "sanderwood/bgpt#5", alone, X, Y,
    names=ALL, ratio=1 / 4, cause="1 / size of world: divided once more", world=4,
)  # fmt: skip
def the_loss_is_divided_and_the_gradient_too(faulty: bool, x: Any, y: Any) -> Any:
    m = DistributedDataParallel(model())
    loss = F.mse_loss(m(own(x)), own(y))
    (loss / dist.get_world_size() if faulty else loss).backward()
    return m
