"""Mixtures of experts, by hand: experts sharded over ranks, and tensor parallelism inside them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .entries import Copied, Family, GatheredOnce, Summed, numbers, own, reduced

entry = Family()
X, Y = numbers(8, 4, seed=7), numbers(8, 4, seed=8)
EXPERTS = 4
ROUTED = "router.weight"
OF_EXPERTS = "w1 w2"
EVERY = f"{ROUTED} {OF_EXPERTS}"


class Mixture(nn.Module):
    """A router, and experts of two layers: all of them, or those of a rank. Each token goes to its
    best expert, weighted by its score.
    """

    def __init__(self, n: int = 1, rank: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(4, EXPERTS, bias=False).double()
        w1 = torch.randn(EXPERTS, 4, 6, dtype=torch.float64) / 2
        w2 = torch.randn(EXPERTS, 6, 4, dtype=torch.float64) / 2
        self.w1 = nn.Parameter(w1.chunk(n)[rank].clone())
        self.w2 = nn.Parameter(w2.chunk(n)[rank].clone())
        self.first = rank * len(self.w1)
        self.register_buffer("bias", torch.zeros(EXPERTS, dtype=torch.float64))

    def routes(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.router(x).softmax(-1)
        chosen = (scores.detach() + self.bias).argmax(-1)
        return scores, chosen

    def experts(self, x: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The output of the experts that are here, zero for tokens of others."""
        out = torch.zeros_like(x)
        for i in range(len(self.w1)):
            is_here = (chosen == self.first + i).unsqueeze(-1)
            y = torch.tanh(x @ self.w1[i]) @ self.w2[i]
            weight = scores[:, self.first + i : self.first + i + 1]
            out = out + torch.where(is_here, y * weight, 0.0)
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, *self.routes(x))


def alone(x: torch.Tensor, y: torch.Tensor) -> Any:
    m = Mixture()
    F.mse_loss(m(x), y).backward()
    return m


def expert_parallel(x: Any, y: Any, group: Any = None) -> Mixture:
    """Each rank has some tokens and some experts: tokens are gathered, outputs summed and cut. The
    gradients of experts are those of all tokens; those of the router of this rank's.
    """
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    m = Mixture(n, rank)
    mine, target = x.chunk(n)[rank], y.chunk(n)[rank]
    scores, chosen = m.routes(mine)
    parts = [torch.empty_like(chosen) for _ in range(n)]
    dist.all_gather(parts, chosen, group=group)
    tokens = GatheredOnce.apply(mine.clone(), group, 0)
    every_score = GatheredOnce.apply(scores, group, 0)
    out = ScatteredOver.apply(m.experts(tokens, every_score, torch.cat(parts)), group)
    F.mse_loss(out, target).backward()
    return m


class ScatteredOver(torch.autograd.Function):
    """The sum over a group, of which each rank keeps its rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        parts = [torch.empty_like(g) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, g.contiguous(), group=ctx.group)
        return torch.cat(parts), None


def finished(m: Mixture, *, router: bool = True, divide: bool = True, group: Any = None) -> Mixture:
    """Average the router's gradient over ranks, and divide those of experts."""
    n = dist.get_world_size(group)
    if router:
        dist.all_reduce(m.router.weight.grad, dist.ReduceOp.AVG, group=group)
    if divide:
        m.w1.grad.div_(n)
        m.w2.grad.div_(n)
    return m


@entry(
    "pytorch/pytorch#160285", alone, X, Y,
    names=OF_EXPERTS, ratio=2.0, cause="size of world: reduced twice, or summed",
)  # fmt: skip
def gradients_of_experts_are_doubled(faulty: bool, x: Any, y: Any) -> Any:
    return finished(expert_parallel(x, y), divide=not faulty)


@entry(
    "databricks/megablocks#86", alone, X, Y,
    names=OF_EXPERTS, ratio=1 / 4, cause="1 / size of world: divided once more", world=4,
)  # fmt: skip
def gradients_of_experts_are_divided_twice(faulty: bool, x: Any, y: Any) -> Any:
    m = finished(expert_parallel(x, y))
    if faulty:
        m.w1.grad.div_(dist.get_world_size())
        m.w2.grad.div_(dist.get_world_size())
    return m


@entry(
    "deepspeedai/DeepSpeed#5259", alone, X, Y,
    names=OF_EXPERTS, ratio=2.0, cause="size of (dp|ep)", world=4, mesh={"dp": 2, "ep": 2},
)  # fmt: skip
def experts_are_averaged_over_their_replicas_alone(
    faulty: bool, x: Any, y: Any, mesh: DeviceMesh
) -> Any:
    dp, ep = mesh["dp"], mesh["ep"]
    m = expert_parallel(own(x, dp), own(y, dp), ep.get_group())
    finished(m, divide=not faulty, group=ep.get_group())
    return reduced(m, mesh=dp)


@entry(
    "NVIDIA/Megatron-LM#5956", alone, X, Y,
    names=OF_EXPERTS, cause="each rank its own: not reduced over dp",
    world=4, mesh={"dp": 2, "ep": 2},
)  # fmt: skip
def experts_are_not_reduced_over_their_replicas(
    faulty: bool, x: Any, y: Any, mesh: DeviceMesh
) -> Any:
    dp, ep = mesh["dp"], mesh["ep"]
    m = expert_parallel(own(x, dp), own(y, dp), ep.get_group())
    finished(m, group=ep.get_group())
    if not faulty:
        return reduced(m, mesh=dp)
    dist.all_reduce(m.router.weight.grad, dist.ReduceOp.AVG, group=dp.get_group())
    return m


@entry(
    "pytorch/torchtitan#4154, a router", alone, X, Y,
    names=ROUTED, cause="each rank its own: not reduced over world",
)  # fmt: skip
def the_router_is_not_reduced(faulty: bool, x: Any, y: Any) -> Any:
    return finished(expert_parallel(x, y), router=not faulty)


@entry(
    "huggingface/transformers#48205", alone, X, Y,
    names=OF_EXPERTS, cause="other values",
)  # fmt: skip
def data_parallelism_averages_experts_of_other_ranks(faulty: bool, x: Any, y: Any) -> Any:
    m = expert_parallel(x, y)
    if faulty:
        return reduced(m, dist.ReduceOp.AVG)  # as if each rank had the same experts
    return finished(m)


class SlicedExperts(Mixture):
    """Experts of which each rank has some hidden features, with an input and scores that are equal
    on all ranks.
    """

    def __init__(self, n: int = 1, rank: int = 0, *, copied: bool = True) -> None:
        super().__init__()
        self.w1 = nn.Parameter(self.w1.data.chunk(n, 2)[rank].clone())
        self.w2 = nn.Parameter(self.w2.data.chunk(n, 1)[rank].clone())
        self.copied = copied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.routes(x)
        if self.copied:
            scores = Copied.apply(scores, None)
        return Summed.apply(self.experts(x, scores, chosen), None)


@entry(
    "pytorch/torchtitan#4054", alone, X, Y,
    names=ROUTED, cause="each rank its own: not reduced over tp", mesh={"tp": 2},
)  # fmt: skip
def a_router_above_sliced_experts_loses_a_reduction(faulty: bool, x: Any, y: Any) -> Any:
    m = SlicedExperts(dist.get_world_size(), dist.get_rank(), copied=not faulty)
    F.mse_loss(m(x), y).backward()
    return m


@entry(
    "pytorch/torchtitan#2416", alone, X, Y,
    names=ROUTED, ratio=2.0, cause="size of tp: reduced twice", mesh={"tp": 2},
)  # fmt: skip
def a_router_above_sliced_experts_is_reduced_twice(faulty: bool, x: Any, y: Any) -> Any:
    m = SlicedExperts(dist.get_world_size(), dist.get_rank())
    F.mse_loss(m(x), y).backward()
    if faulty:
        dist.all_reduce(m.router.weight.grad)
    return m


def balanced_alone(x: torch.Tensor, y: torch.Tensor) -> Any:
    m = Mixture()
    _, chosen = m.routes(x)
    counts = torch.bincount(chosen, minlength=EXPERTS).double()
    m.bias += 0.01 * (counts.mean() - counts)
    F.mse_loss(m(x), y).backward()
    return m


@entry(
    "pytorch/torchtitan#4154", balanced_alone, X, Y,
    names="bias", kind="buffer", cause="each rank its own: not reduced over world",
)  # fmt: skip
def a_routing_bias_counts_the_tokens_of_a_rank(faulty: bool, x: Any, y: Any) -> Any:
    m = Mixture()
    _, chosen = m.routes(own(x))
    counts = torch.bincount(chosen, minlength=EXPERTS).double()
    if not faulty:
        dist.all_reduce(counts)
    m.bias += 0.01 * (counts.mean() - counts)
    F.mse_loss(m(own(x)), own(y)).backward()
    return reduced(m)


def auxiliary(scores: torch.Tensor, fraction: torch.Tensor) -> torch.Tensor:
    return EXPERTS * (fraction * scores.mean(0)).sum()


def auxiliary_alone(x: torch.Tensor) -> Any:
    m = Mixture()
    scores, chosen = m.routes(x)
    auxiliary(scores, F.one_hot(chosen, EXPERTS).double().mean(0)).backward()
    return m


@entry(
    "pytorch/torchtitan#3000", auxiliary_alone, X,
    names=ROUTED, cause="other values",
)  # fmt: skip
def a_balance_loss_counts_the_tokens_of_a_rank(faulty: bool, x: Any) -> Any:
    m = Mixture()
    scores, chosen = m.routes(own(x))
    fraction = F.one_hot(chosen, EXPERTS).double().mean(0)
    if not faulty:
        dist.all_reduce(fraction, dist.ReduceOp.AVG)
    auxiliary(scores, fraction).backward()
    return reduced(m)


def clipped_alone(x: torch.Tensor, y: torch.Tensor) -> Any:
    m = Mixture()
    F.mse_loss(m(x), y).backward()
    nn.utils.clip_grad_norm_(m.parameters(), 0.01)
    return m


@entry(
    "NVIDIA-NeMo/RL#1693", clipped_alone, X, Y,
    names=EVERY, cause="each rank another scale",
)  # fmt: skip
def the_norm_has_the_experts_of_a_rank(faulty: bool, x: Any, y: Any) -> Any:
    m = finished(expert_parallel(x, y))
    square = m.w1.grad.norm() ** 2 + m.w2.grad.norm() ** 2
    if not faulty:
        dist.all_reduce(square)
    norm = (square + m.router.weight.grad.norm() ** 2).sqrt()
    for p in m.parameters():
        p.grad.mul_((0.01 / (norm + 1e-6)).clamp(max=1.0))
    return m


@entry(
    "pytorch/torchtitan#3604", alone, X, Y,
    names=EVERY, cause="other values",
)  # fmt: skip
def outputs_are_combined_at_local_indices(faulty: bool, x: Any, y: Any) -> Any:
    n, rank = dist.get_world_size(), dist.get_rank()
    m = Mixture(n, rank)
    mine, target = own(x), own(y)
    scores, chosen = m.routes(mine)
    parts = [torch.empty_like(chosen) for _ in range(n)]
    dist.all_gather(parts, chosen)
    tokens = GatheredOnce.apply(mine.clone(), None, 0)
    out = m.experts(tokens, GatheredOnce.apply(scores, None, 0), torch.cat(parts))
    out = Summed.apply(out, None) if n == 1 else ScatteredOver.apply(out, None)
    if faulty and n > 1:  # indices of sorted tokens, as if all ranks' began at 0
        order = torch.cat(parts).argsort(stable=True)[: len(out)] % len(out)
        out = out[order]
    F.mse_loss(out, target).backward()
    return finished(m)


class Shared(Mixture):
    """Experts, and one that all tokens have."""

    def __init__(self, n: int = 1, rank: int = 0) -> None:
        super().__init__(n, rank)
        self.shared = nn.Parameter(numbers(4, 4, seed=11) / 2)


def shared_alone(x: torch.Tensor, y: torch.Tensor) -> Any:
    m = Shared()
    F.mse_loss(m(x) + x @ m.shared, y).backward()
    return m


@entry(
    "pytorch/torchtitan#3192", shared_alone, X, Y,
    names="shared", ratio=2.0, cause="size of world: reduced twice, or summed",
)  # fmt: skip
def a_shared_expert_is_summed_as_the_routed_ones(faulty: bool, x: Any, y: Any) -> Any:
    n, rank = dist.get_world_size(), dist.get_rank()
    m = Shared(n, rank)
    scores, chosen = m.routes(x)
    routed = m.experts(x, Copied.apply(scores, None), chosen)
    F.mse_loss(Summed.apply(routed, None) + x @ m.shared, y).backward()
    if faulty:
        dist.all_reduce(m.shared.grad)
    return m
