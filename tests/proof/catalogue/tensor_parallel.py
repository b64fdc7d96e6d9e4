"""Tensor parallelism, by `parallelize_module` and by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from .data_parallel import X, Y, alone, clipped_alone, model
from .entries import Copied, Family, Gathered, GatheredOnce, Summed, numbers, own

entry = Family()


class Block(nn.Module):
    """A norm, and two layers that tensor parallelism shards; of one rank, or of all."""

    def __init__(self, n: int = 1, rank: int = 0, group: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(4).double()
        up, down = nn.Linear(4, 6).double(), nn.Linear(6, 4).double()
        with torch.no_grad():
            self.norm.weight.copy_(torch.linspace(0.5, 2, 4))
        self.up = nn.Linear(4, 6 // n).double()
        self.down = nn.Linear(6 // n, 4).double()
        self.up.weight.data = up.weight.data.chunk(n)[rank].clone()
        self.up.bias.data = up.bias.data.chunk(n)[rank].clone()
        self.down.weight.data = down.weight.data.chunk(n, 1)[rank].clone()
        self.down.bias.data = down.bias.data.clone()
        self.group, self.n = group, n

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.n == 1 else Copied.apply(x, self.group)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.n == 1 else Summed.apply(x, self.group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(self.enter(self.norm(x))))
        return self.leave(hidden @ self.down.weight.T) + self.down.bias


A, B = numbers(6, 4, seed=3), numbers(6, 4, seed=4)


def block_alone(x: torch.Tensor, y: torch.Tensor) -> Any:
    m = Block()
    F.mse_loss(m(x), y).backward()
    return m


def block_of_rank(cls: type[Block] = Block, group: Any = None) -> Block:
    return cls(dist.get_world_size(group), dist.get_rank(group), group)


class ScaledBias(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(self.enter(self.norm(x))))
        return self.leave(hidden @ self.down.weight.T + self.down.bias / self.n)


@entry(
    "pytorch/torchtitan#4332", block_alone, A, B,
    names="down.bias", ratio=1 / 2, cause="1 / size of world: divided once more",
)  # fmt: skip
def a_bias_is_divided_in_the_backward_too(faulty: bool, x: Any, y: Any) -> Any:
    m = block_of_rank(ScaledBias if faulty else Block)
    F.mse_loss(m(x), y).backward()
    return m


@entry(
    "pytorch/torchtitan#4245", block_alone, A, B,
    names="down.bias", ratio=3.0, cause="size of world: reduced twice, or summed", world=3,
)  # fmt: skip
def a_replicated_bias_is_summed_over_ranks(faulty: bool, x: Any, y: Any) -> Any:
    m = block_of_rank()
    F.mse_loss(m(x), y).backward()
    if faulty:
        dist.all_reduce(m.down.bias.grad)
    return m


class BiasPerRank(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(self.enter(self.norm(x))))
        return self.leave(hidden @ self.down.weight.T + self.down.bias)


def linear_alone(x: torch.Tensor, w: torch.Tensor) -> Any:
    m = Block()
    out = m(x)
    (out * w).sum().backward()
    return out, m


@entry(
    "pytorch/torchtitan#2106", linear_alone, A, B,
    names="0", kind="result", cause="other values",
)  # fmt: skip
def a_bias_is_added_by_every_rank(faulty: bool, x: Any, w: Any) -> Any:
    m = block_of_rank(BiasPerRank if faulty else Block)
    out = m(x)
    (out * w).sum().backward()
    return out, m


class NotCopied(Block):
    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return x


@entry(
    "pytorch/torchtitan#1805", block_alone, A, B,
    names="norm.weight norm.bias", cause="each rank its own: not reduced over world",
)  # fmt: skip
def the_input_of_a_column_parallel_layer_is_not_reduced(faulty: bool, x: Any, y: Any) -> Any:
    m = block_of_rank(NotCopied if faulty else Block)
    F.mse_loss(m(x), y).backward()
    return m


@entry(
    "pytorch/torchtitan#3822, by hand", block_alone, A, B,
    names="norm.weight norm.bias", ratio=2.0, cause="size of world: reduced twice",
)  # fmt: skip
def the_input_is_reduced_by_two_layers(faulty: bool, x: Any, y: Any) -> Any:
    m = block_of_rank()
    if faulty:
        m.norm.register_forward_hook(lambda _, __, out: Copied.apply(out, None))
    F.mse_loss(m(x), y).backward()
    return m


class Head(nn.Module):
    """A projection whose output is gathered; all ranks go on with equal values."""

    def __init__(self, n: int = 1, rank: int = 0, *, once: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        whole = nn.Linear(4, 6).double()
        self.proj = nn.Linear(4, 6 // n).double()
        self.proj.weight.data = whole.weight.data.chunk(n)[rank].clone()
        self.proj.bias.data = whole.bias.data.chunk(n)[rank].clone()
        self.n, self.once = n, once

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.proj(x)
        if self.n == 1:
            return out
        return (GatheredOnce if self.once else Gathered).apply(out, None, 1)


def head_alone(x: torch.Tensor) -> Any:
    m = Head()
    m(x).logsumexp(1).mean().backward()
    return m


@entry(
    "pytorch/torchtitan#3822", head_alone, A,
    names="proj.weight proj.bias", ratio=3.0, cause="size of world: reduced twice", world=3,
)  # fmt: skip
def a_gather_of_equal_values_reduces_their_gradient(faulty: bool, x: Any) -> Any:
    m = Head(dist.get_world_size(), dist.get_rank(), once=faulty)
    m(x).logsumexp(1).mean().backward()
    return m


def tensor_parallel() -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model(), mesh, plan), mesh


@entry(
    "NVIDIA-NeMo/RL#3788", clipped_alone, X, Y,
    names="0.weight 0.bias 2.weight 2.bias", cause="the clipping norm",
)  # fmt: skip
def the_norm_counts_replicated_parameters_once_a_rank(faulty: bool, x: Any, y: Any) -> Any:
    m, _ = tensor_parallel()
    F.mse_loss(m(x), y).backward()
    squares = {name: p.grad.to_local().norm() ** 2 for name, p in m.named_parameters()}
    replicated = torch.zeros((), dtype=torch.float64) if faulty else squares.pop("2.bias")
    square = torch.stack([*squares.values()]).sum()
    dist.all_reduce(square)
    norm = (square + replicated).sqrt()
    for p in m.parameters():
        p.grad.mul_((0.5 / (norm + 1e-6)).clamp(max=1.0))
    return m


@entry(
    "pytorch/torchtitan#2387", alone, X, Y,
    names="0.weight 0.bias", cause="each rank its own: not reduced over tp",
)  # fmt: skip
def a_local_tensor_has_no_gradient_placement(faulty: bool, x: Any, y: Any) -> Any:
    """The first layer is replicated, and each rank uses its own columns of the second one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    m = model()
    for name, p in [*m[0].named_parameters()]:
        replicated = DTensor.from_local(p.data, mesh, [Replicate()])
        setattr(m[0], name, nn.Parameter(replicated))
    hidden = m[0](DTensor.from_local(x, mesh, [Replicate()])).tanh()
    local = hidden.to_local(grad_placements=None if faulty else [Partial()])
    columns = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    m[2].weight = nn.Parameter(m[2].weight.data[:, columns].clone())
    out = Summed.apply(local[:, columns] @ m[2].weight.T, None) + m[2].bias
    loss = F.mse_loss(out, y)
    loss.backward()
    return loss, m


class Heads(nn.Module):
    """Attention-like heads, each scaled by one replicated norm."""

    def __init__(self, n: int = 1, rank: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        whole = nn.Linear(4, 8).double()
        self.q = nn.Linear(4, 8 // n, bias=False).double()
        self.q.weight.data = whole.weight.data.chunk(n)[rank].clone()
        self.q_norm = nn.RMSNorm(2).double()
        with torch.no_grad():
            self.q_norm.weight.copy_(torch.tensor([0.5, 2.0]))
        self.n = n

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.q_norm(self.q(x).unflatten(1, (-1, 2)))
        total = heads.tanh().sum((1, 2))
        return total if self.n == 1 else Summed.apply(total, None)


def heads_alone(x: torch.Tensor) -> Any:
    m = Heads()
    m(x).pow(2).mean().backward()
    return m


@entry(
    "NVIDIA-NeMo/RL#3716", heads_alone, A,
    names="q_norm.weight", cause="each rank its own: not reduced over world",
)  # fmt: skip
def a_norm_of_each_head_is_not_reduced(faulty: bool, x: Any) -> Any:
    m = Heads(dist.get_world_size(), dist.get_rank())
    m(x).pow(2).mean().backward()
    if not faulty:
        dist.all_reduce(m.q_norm.weight.grad)
    return m


def dp_tp_alone(x: torch.Tensor, y: torch.Tensor) -> Any:
    return block_alone(x, y)


@entry(
    "meta-pytorch/torchtune#2420", dp_tp_alone, A, B,
    names="norm.weight norm.bias down.bias up.weight up.bias down.weight", ratio=1 / 2,
    cause="1 / size of dp or tp: divided once more", world=4, mesh={"dp": 2, "tp": 2},
)  # fmt: skip
def gradients_are_divided_by_the_ranks_of_the_world(
    faulty: bool, x: Any, y: Any, mesh: DeviceMesh
) -> Any:
    dp, tp = mesh["dp"], mesh["tp"]
    m = block_of_rank(group=tp.get_group())
    F.mse_loss(m(own(x, dp)), own(y, dp)).backward()
    for p in m.parameters():
        dist.all_reduce(p.grad, group=dp.get_group())
        p.grad.div_(dist.get_world_size() if faulty else dp.size())
    return m


@entry(
    "huggingface/transformers#48516", dp_tp_alone, A, B,
    names="up.weight up.bias down.weight", cause="other values", world=4, mesh={"dp": 2, "tp": 2},
)  # fmt: skip
def gradients_of_shards_are_averaged_over_the_world(
    faulty: bool, x: Any, y: Any, mesh: DeviceMesh
) -> Any:
    dp, tp = mesh["dp"], mesh["tp"]
    m = block_of_rank(group=tp.get_group())
    F.mse_loss(m(own(x, dp)), own(y, dp)).backward()
    for name, p in m.named_parameters():
        is_sharded = faulty and name in ("up.weight", "down.weight", "up.bias")
        dist.all_reduce(p.grad, dist.ReduceOp.AVG, group=None if is_sharded else dp.get_group())
    return m


class Vocabulary(nn.Module):
    """An embedding of which a rank has some rows."""

    def __init__(self, n: int = 1, rank: int = 0, *, masked: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        whole = nn.Embedding(8, 3).double()
        rows = 8 // n
        self.rows = nn.Parameter(whole.weight.data[rows * rank : rows * rank + rows].clone())
        self.first, self.n, self.masked = rows * rank, n, masked

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mine = (ids - self.first).clamp(0, len(self.rows) - 1)
        out = self.rows[mine]
        if self.masked:
            is_here = (ids >= self.first) & (ids < self.first + len(self.rows))
            out = out * is_here.unsqueeze(-1)
        return out if self.n == 1 else Summed.apply(out, None)


IDS = torch.tensor([0, 3, 5, 7, 7, 2])


def vocabulary_alone(ids: torch.Tensor) -> Any:
    m = Vocabulary()
    (m(ids) ** 2).mean().backward()
    return m


@entry(
    "NVIDIA/Megatron-LM#7452, a mask of a vocabulary", vocabulary_alone, IDS,
    names="rows", cause="other values",
)  # fmt: skip
def ids_of_other_ranks_are_not_masked(faulty: bool, ids: Any) -> Any:
    m = Vocabulary(dist.get_world_size(), dist.get_rank(), masked=not faulty)
    (m(ids) ** 2).mean().backward()
    return m
