"""Regions of tensor parallelism as autograd.Functions that communicate by hand, as people have
them, and losses that use them: each beside the loss of one device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F

Op = dist.ReduceOp


def _reduce(x: torch.Tensor, group: Any) -> torch.Tensor:
    if dist.get_world_size(group) == 1:
        return x
    dist.all_reduce(x.contiguous(), group=group)  # in place, as x is contiguous
    return x


def _own_columns(x: torch.Tensor, group: Any) -> torch.Tensor:
    rows = torch.stack(x.chunk(dist.get_world_size(group), -1))
    rank = torch.as_tensor(dist.get_rank(group))
    return rows.index_select(0, rank.reshape(1)).squeeze(0)


def _all_columns(x: torch.Tensor, group: Any) -> torch.Tensor:
    n = dist.get_world_size(group)
    every = [torch.empty_like(x) for _ in range(n)]
    dist.all_gather(every, x.contiguous(), group=group)
    return torch.cat(every, -1)


def _all_rows(x: torch.Tensor, group: Any) -> torch.Tensor:
    n = dist.get_world_size(group)
    out = x.new_empty((x.shape[0] * n, *x.shape[1:]))
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def _own_rows(x: torch.Tensor, group: Any) -> torch.Tensor:
    n = dist.get_world_size(group)
    out = x.new_empty((x.shape[0] // n, *x.shape[1:]))
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


class Copy(torch.autograd.Function):
    """The identity, whose gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return _reduce(g.clone(), ctx.group), None


class FunctionalCopy(torch.autograd.Function):
    """The same, by the functional collective."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return functional.all_reduce(g, "sum", ctx.group), None


class Reduce(torch.autograd.Function):
    """The sum over ranks, whose gradient is that of each."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        return _reduce(x, group)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g, None


class Scatter(torch.autograd.Function):
    """This rank's columns of what all have."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _own_columns(x, group)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return _all_columns(g, ctx.group), None


class Gather(torch.autograd.Function):
    """The columns of all ranks. Its forward does not take the context."""

    @staticmethod
    def forward(x: torch.Tensor, group: Any) -> torch.Tensor:
        return _all_columns(x, group)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return _own_columns(g, ctx.group), None


class GatherRows(torch.autograd.Function):
    """The rows of all ranks, before a layer whose gradients are terms."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _all_rows(x, group)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return _own_rows(g, ctx.group), None


class ScatterRows(torch.autograd.Function):
    """This rank's rows of the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _own_rows(x, group)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return _all_rows(g, ctx.group), None


class Linear(torch.autograd.Function):
    """A layer with sharded columns, whose gradient is summed while the weight's is computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, group: Any) -> Any:
        ctx.save_for_backward(x, w)
        ctx.group = group
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        gx = g @ w.T
        work = dist.all_reduce(gx, group=ctx.group, async_op=True)
        gw = x.T @ g
        work.wait()
        return gx, gw, None


class CrossEntropy(torch.autograd.Function):
    """The loss of logits whose classes are sharded."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, target: torch.Tensor, group: Any) -> Any:
        largest = x.amax(-1)
        dist.all_reduce(largest, op=Op.MAX, group=group)
        x = x - largest.unsqueeze(-1)
        start = dist.get_rank(group) * x.shape[-1]
        is_others = (target < start) | (target >= start + x.shape[-1])
        own = (target - start).masked_fill(is_others, 0)
        wanted = x.gather(-1, own.unsqueeze(-1)).squeeze(-1)
        wanted = wanted.masked_fill(is_others, 0.0)
        dist.all_reduce(wanted, group=group)
        total = x.exp().sum(-1)
        dist.all_reduce(total, group=group)
        ctx.save_for_backward(x.exp() / total.unsqueeze(-1), is_others, own)
        return total.log() - wanted

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        shares, is_others, own = ctx.saved_tensors
        ones = (1.0 - is_others.to(g.dtype)).unsqueeze(-1)
        hit = torch.zeros_like(shares).scatter(-1, own.unsqueeze(-1), ones)
        return (shares - hit) * g.unsqueeze(-1), None, None


# (the loss on a rank, of x, w, v, labels and the group; that of one device)
def _mlp(x: Any, w: Any, v: Any, labels: Any, group: Any) -> Any:
    h = torch.tanh(Copy.apply(x, group) @ w)
    return ((x + Reduce.apply(h @ v, group)) ** 2).sum()


def _functional(x: Any, w: Any, v: Any, labels: Any, group: Any) -> Any:
    h = torch.tanh(FunctionalCopy.apply(x, group) @ w)
    return ((x + Reduce.apply(h @ v, group)) ** 2).sum()


def _overlapped(x: Any, w: Any, v: Any, labels: Any, group: Any) -> Any:
    h = torch.tanh(Linear.apply(x, w, group))
    return ((x + Reduce.apply(h @ v, group)) ** 2).sum()


def _plain(x: Any, w: Any, v: Any, labels: Any) -> Any:
    return ((x + torch.tanh(x @ w) @ v) ** 2).sum()


def _columns(x: Any, w: Any, v: Any, labels: Any, group: Any) -> Any:
    h = Gather.apply(torch.tanh(Copy.apply(x, group) @ w), group)
    return (h**2).sum() + Reduce.apply((Scatter.apply(h, group) @ v).sum(), group)


def _plain_columns(x: Any, w: Any, v: Any, labels: Any) -> Any:
    h = torch.tanh(x @ w)
    return (h**2).sum() + (h @ v).sum()


def _rows(x: Any, w: Any, v: Any, labels: Any, group: Any) -> Any:
    h = torch.tanh(Copy.apply(x, group) @ w)
    rows = ScatterRows.apply(h @ v, group) ** 2
    again = torch.tanh(GatherRows.apply(rows, group) @ w)
    return Reduce.apply(ScatterRows.apply(again @ v, group).sum(), group)


def _plain_rows(x: Any, w: Any, v: Any, labels: Any) -> Any:
    return (torch.tanh((torch.tanh(x @ w) @ v) ** 2 @ w) @ v).sum()


def _classes(x: Any, w: Any, v: Any, labels: Any, group: Any) -> Any:
    logits = Copy.apply(torch.tanh(x), group) @ w
    return CrossEntropy.apply(logits, labels, group).mean()


def _plain_classes(x: Any, w: Any, v: Any, labels: Any) -> Any:
    return F.cross_entropy(torch.tanh(x) @ w, labels)


REGIONS = {
    "copy and reduce": (_mlp, _plain),
    "functional": (_functional, _plain),
    "overlapped": (_overlapped, _plain),
    "columns": (_columns, _plain_columns),
    "rows": (_rows, _plain_rows),
    "classes": (_classes, _plain_classes),
}


def given(dtype: torch.dtype = torch.float64) -> Any:
    """The arguments of one device."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=dtype, generator=generator)
    return draw(4, 6), draw(6, 8), draw(8, 6), torch.tensor([0, 7, 3, 5])


def own_of(rank: int, n: int) -> Any:
    """Those of one of n ranks."""
    x, w, v, labels = given()
    return x, w.chunk(n, 1)[rank].clone(), v.chunk(n, 0)[rank].clone(), labels
