"""Sequence parallelism and context parallelism: each rank has some of the positions."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from .entries import Family, GatheredOnce, numbers, own, reduced
from .tensor_parallel import A, B, Block, block_alone

entry = Family()
X = numbers(2, 8, 4, seed=6)  # (batch, positions, features)
TARGETS = torch.tensor([[1, 3, 0, 2, 4, 1, 0, 3], [2, 2, 4, 0, 1, 3, 3, 1]])
MASK = torch.tensor([[1, 1, 1, 1, 0, 0, 1, 0], [1, 1, 0, 1, 0, 0, 0, 0]], dtype=torch.float64)
ALL = "q.weight kv.weight out.weight out.bias"


class Scattered(torch.autograd.Function):
    """The sum over ranks, of which each keeps its rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return own(x).clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        parts = [torch.empty_like(g) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, g.contiguous())
        return torch.cat(parts)


class SequenceBlock(Block):
    """Between its layers a rank has some of the rows."""

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return GatheredOnce.apply(x, None, 0)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return Scattered.apply(x)


def sequence_block() -> SequenceBlock:
    return SequenceBlock(dist.get_world_size(), dist.get_rank())


REPLICATED = ("norm.weight", "norm.bias", "down.bias")


def sequence_step(x: Any, y: Any, reduced_names: tuple[str, ...], scale: float = 1.0) -> Any:
    m = sequence_block()
    loss = F.mse_loss(m(own(x)), own(y)) / dist.get_world_size() * scale
    loss.backward()
    for name, p in m.named_parameters():
        if name in reduced_names:
            dist.all_reduce(p.grad)
    return m


@entry(
    "NVIDIA/Megatron-LM#1446", block_alone, A, B,
    names="norm.weight norm.bias", cause="each rank its own: not reduced over world",
)  # fmt: skip
def norms_are_not_reduced(faulty: bool, x: Any, y: Any) -> Any:
    return sequence_step(x, y, REPLICATED[2:] if faulty else REPLICATED)


@entry(
    "NVIDIA/TransformerEngine#435", block_alone, A, B,
    names="norm.weight norm.bias down.bias", cause="each rank its own: not reduced over world",
    world=3,
)  # fmt: skip
def replicated_parameters_are_not_reduced(faulty: bool, x: Any, y: Any) -> Any:
    return sequence_step(x, y, () if faulty else REPLICATED)


@entry(
    "EleutherAI/gpt-neox#1257", block_alone, A, B,
    names="norm.weight norm.bias", ratio=1 / 2, cause="1 / size of world: divided once more",
)  # fmt: skip
def norms_are_averaged_where_they_are_summed(faulty: bool, x: Any, y: Any) -> Any:
    m = sequence_block()
    (F.mse_loss(m(own(x)), own(y)) / dist.get_world_size()).backward()
    dist.all_reduce(m.down.bias.grad)
    for p in m.norm.parameters():
        dist.all_reduce(p.grad, dist.ReduceOp.AVG if faulty else dist.ReduceOp.SUM)
    return m


@entry(
    "NVIDIA/Megatron-LM#673", block_alone, A, B,
    names="norm.weight norm.bias up.weight up.bias down.weight down.bias", ratio=2.0,
    cause="size of world: reduced twice, or summed",
)  # fmt: skip
def the_mean_of_a_part_is_taken_for_that_of_all(faulty: bool, x: Any, y: Any) -> Any:
    return sequence_step(x, y, REPLICATED, dist.get_world_size() if faulty else 1.0)


@entry(
    "huggingface/transformers, SequenceParallel of a plan", block_alone, A, B,
    names="norm.weight norm.bias", cause="each rank its own: not reduced over tp",
)  # fmt: skip
def a_norm_outside_of_the_plan_is_not_reduced(faulty: bool, x: Any, y: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    m = Block()
    plan: dict[str, Any] = {
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(),
    }
    if not faulty:
        plan["norm"] = SequenceParallel(sequence_dim=0)
    parallelize_module(m, mesh, plan)
    F.mse_loss(m.down(torch.tanh(m.up(m.norm(own(x))))), y).backward()
    return m


# Context parallelism: attention of each rank's positions, with the keys of all


class Attention(nn.Module):
    """Causal attention with positions, and an output projection to 5 classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q = nn.Linear(4, 4, bias=False).double()
        self.kv = nn.Linear(4, 8, bias=False).double()
        self.out = nn.Linear(4, 5).double()

    def forward(self, x: torch.Tensor, positions: torch.Tensor, window: int, gather: Any) -> Any:
        x = x + torch.sin(positions.double()).unsqueeze(-1)
        keys, values = gather(self.kv(x)).chunk(2, -1)
        rows = torch.arange(keys.shape[1])
        own_rows = rows if len(positions) == len(rows) else positions
        distance = own_rows.unsqueeze(1) - rows
        mask = (distance >= 0) & (distance < window)
        attended = F.scaled_dot_product_attention(self.q(x), keys, values, attn_mask=mask)
        return self.out(attended)


def whole(x: torch.Tensor) -> torch.Tensor:
    return x


def gathered(x: torch.Tensor) -> torch.Tensor:
    return GatheredOnce.apply(x, None, 1)


def rows_of_rank(length: int) -> torch.Tensor:
    return own(torch.arange(length))


def tokens(logits: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * mask.flatten()).sum()


def attention_alone(x: Any, targets: Any, mask: Any, window: int = 8) -> Any:
    m = Attention()
    logits = m(x, torch.arange(8), window, whole)
    (tokens(logits, targets, mask) / mask.sum()).backward()
    return m


def context_step(
    x: Any, targets: Any, mask: Any, count: torch.Tensor | None = None, *,
    positions: Any = None, window: int = 8,
) -> Any:  # fmt: skip
    """The step of a rank: the gradient is the sum over ranks."""
    m = Attention()
    x, targets, mask_here = own(x, dim=1), own(targets, dim=1), own(mask, dim=1)
    rows = rows_of_rank(8)
    logits = m(x, rows if positions is None else positions, window, gathered)
    (tokens(logits, targets, mask_here) / (mask.sum() if count is None else count)).backward()
    return m


@entry(
    "volcengine/verl#5983", attention_alone, X, TARGETS, MASK,
    names=ALL, cause="a mean of means: the losses of the ranks of world need the weights 7, 1",
)  # fmt: skip
def tokens_of_each_part_are_averaged(faulty: bool, x: Any, targets: Any, mask: Any) -> Any:
    count = own(mask, dim=1).sum() * dist.get_world_size() if faulty else None
    return reduced(context_step(x, targets, mask, count), dist.ReduceOp.SUM)


@entry(
    "NVIDIA/Megatron-LM#7513", attention_alone, X, TARGETS, torch.ones_like(MASK),
    names=ALL, ratio=1 / 2, cause="1 / size of world: divided once more",
)  # fmt: skip
def gradients_of_context_parts_are_averaged(faulty: bool, x: Any, targets: Any, mask: Any) -> Any:
    m = context_step(x, targets, mask)
    return reduced(m, dist.ReduceOp.AVG if faulty else dist.ReduceOp.SUM)


@entry(
    "NVIDIA/Megatron-LM#673, no reduction", attention_alone, X, TARGETS, MASK,
    names=ALL, cause="each rank its own: not reduced over world",
)  # fmt: skip
def gradients_of_context_parts_are_not_reduced(
    faulty: bool, x: Any, targets: Any, mask: Any
) -> Any:
    m = context_step(x, targets, mask)
    return m if faulty else reduced(m, dist.ReduceOp.SUM)


@entry(
    "NVIDIA/Megatron-LM#4075", attention_alone, X, TARGETS, MASK,
    names=ALL, cause="other values",
)  # fmt: skip
def positions_begin_at_each_part(faulty: bool, x: Any, targets: Any, mask: Any) -> Any:
    positions = torch.arange(4) if faulty else None
    return reduced(context_step(x, targets, mask, positions=positions), dist.ReduceOp.SUM)


def windowed_alone(x: Any, targets: Any, mask: Any) -> Any:
    return attention_alone(x, targets, mask, window=2)


@entry(
    "huggingface/accelerate#4177", windowed_alone, X, TARGETS, MASK,
    names=ALL, cause="other values",
)  # fmt: skip
def a_window_becomes_full_attention(faulty: bool, x: Any, targets: Any, mask: Any) -> Any:
    is_lost = faulty and dist.get_world_size() > 1  # one rank has its mask
    m = context_step(x, targets, mask, window=8 if is_lost else 2)
    return reduced(m, dist.ReduceOp.SUM)


def shifted_alone(x: Any, labels: Any) -> Any:
    targets = torch.cat([labels[:, 1:], labels[:, :1] * 0], 1)
    mask = torch.ones_like(MASK)
    mask[:, -1] = 0
    return attention_alone(x, targets, mask)


@entry(
    "NVIDIA-NeMo/Automodel#3544", shifted_alone, X, TARGETS,
    names=ALL, cause="other values",
)  # fmt: skip
def labels_are_shifted_within_each_part(faulty: bool, x: Any, labels: Any) -> Any:
    mask = torch.ones_like(MASK)
    mask[:, -1] = 0
    targets = torch.cat([labels[:, 1:], labels[:, :1] * 0], 1)
    if faulty and dist.get_world_size() > 1:  # the last label of a part is its own first one
        parts = [torch.cat([p[:, 1:], p[:, :1]], 1) for p in labels.chunk(dist.get_world_size(), 1)]
        targets = torch.cat(parts, 1)
    return reduced(context_step(x, targets, mask), dist.ReduceOp.SUM)


class Unreduced(torch.autograd.Function):
    """All parts of a dim, whose gradient is that of this rank's use alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return own(g, dim=1).contiguous()


@entry(
    "pytorch/pytorch#58005, keys of other ranks", attention_alone, X, TARGETS, MASK,
    names="kv.weight", cause="other values",
)  # fmt: skip
def gradients_of_keys_of_other_ranks_are_lost(faulty: bool, x: Any, targets: Any, mask: Any) -> Any:
    m = Attention()
    gather = Unreduced.apply if faulty else gathered
    logits = m(own(x, dim=1), rows_of_rank(8), 8, gather)
    (tokens(logits, own(targets, dim=1), own(mask, dim=1)) / mask.sum()).backward()
    return reduced(m, dist.ReduceOp.SUM)


@entry(
    "volcengine/verl#5641", attention_alone, X, TARGETS, MASK,
    names=ALL, cause="each rank its own: not reduced over dp", world=4, mesh={"dp": 2, "cp": 2},
)  # fmt: skip
def one_of_two_axes_is_reduced(
    faulty: bool, x: Any, targets: Any, mask: Any, mesh: DeviceMesh
) -> Any:
    dp, cp = mesh["dp"], mesh["cp"]
    part = lambda a: own(own(a, dp), cp, dim=1)
    m = Attention()
    gather = lambda kv: GatheredOnce.apply(kv, cp.get_group(), 1)
    logits = m(part(x), own(torch.arange(8), cp), 8, gather)
    (tokens(logits, part(targets), part(mask)) / mask.sum()).backward()
    reduced(m, dist.ReduceOp.SUM, cp)
    return m if faulty else reduced(m, dist.ReduceOp.SUM, dp)
