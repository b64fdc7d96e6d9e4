"""Programs of one rank's tensors that call the collectives of torch.distributed by hand, for eager
torch and for `jit`. As in programs.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.nn import functional as forms

from tests.dtensors.programs import Program

Op = dist.ReduceOp


def _group(mesh: Any) -> Any:
    return mesh.get_group(mesh.ndim - 1)


def _count(mesh: Any) -> int:
    return mesh.size(mesh.ndim - 1)


def listed(x: Any, w: Any, mesh: Any) -> Any:
    n, group = _count(mesh), _group(mesh)
    every = [torch.empty_like(x) for _ in range(n)]
    dist.all_gather(every, x, group=group)
    sent = [x * (k + 1) for k in range(n)]
    received = [torch.empty_like(x) for _ in range(n)]
    dist.all_to_all(received, sent, group=group)
    scattered = torch.empty_like(x)
    dist.reduce_scatter(scattered, sent, group=group)
    return every, received, scattered


def by_ops(x: Any, w: Any, mesh: Any) -> Any:
    group = _group(mesh)
    whole, bits = (x * 3).to(torch.int64), x > 0
    found = []
    for op in (Op.PRODUCT, Op.MAX):
        y = x.new_empty(4 // _count(mesh), 6)
        dist.reduce_scatter_tensor(y, x, op=op, group=group)
        found.append(y)
    for op in (Op.BAND, Op.BOR, Op.BXOR, Op.PRODUCT):
        y = whole.clone()
        dist.all_reduce(y, op=op)
        found.append(y)
    for op in (Op.SUM, Op.MAX):
        y = bits.clone()
        dist.all_reduce(y, op=op)
        found.append(y)
    mean = x.clone()
    dist.all_reduce(mean, op=Op.AVG)
    return found, mean, functional.all_reduce(x, "product", group)


def on_one(x: Any, w: Any, mesh: Any) -> Any:
    """Reductions on one rank; torch says nothing of what the others have."""
    total, largest = x.clone(), x.clone()
    dist.reduce(total, 1)
    group = _group(mesh)
    dist.reduce(largest, group_dst=1, op=Op.MAX, group=group)
    first = x.clone()
    dist.broadcast(first, src=dist.get_global_rank(group, 1), group=group)
    is_last = mesh.get_local_rank(mesh.ndim - 1) == 1
    return total * (dist.get_rank() == 1), largest * is_last, first


def coalesced(x: Any, w: Any, mesh: Any) -> Any:
    group = _group(mesh)
    a, b = x.clone(), w.clone()
    dist.all_reduce_coalesced([a, b], op=Op.MAX)
    return (
        [a, b],
        functional.all_reduce_coalesced([x, w], "sum", group),
        functional.all_gather_into_tensor_coalesced([x, w], group),
        functional.reduce_scatter_tensor_coalesced([x, w], "sum", [0, 1], group),
        functional.permute_tensor(x[0], list(reversed(range(_count(mesh)))), group),
    )


def autograd_forms(x: Any, w: Any, mesh: Any) -> Any:
    first = dist.get_rank() == 0
    n = dist.get_world_size()
    sent = [w * (k + 1) for k in range(n)]
    return (
        forms.all_reduce(x, op=Op.MAX),
        forms.broadcast(x, 1),
        forms.gather(x, 1),
        forms.scatter(sent, 1),
        forms.reduce(x, 0) * first,
        forms.all_to_all([torch.empty_like(w) for _ in range(n)], sent),
        forms.reduce_scatter(torch.empty_like(w), sent),
    )


def queried(x: Any, w: Any, mesh: Any) -> Any:
    group = _group(mesh)
    ranks = dist.get_process_group_ranks(group)
    every = dist.get_process_group_ranks(dist.group.WORLD)
    mine = sum(ranks) + dist.get_global_rank(group, 1) * 10
    found = dist.distributed_c10d._rank_not_in_group(group)
    return x * mine, every, dist.get_group_rank(dist.group.WORLD, 1), found


def by_ops_of_names(x: Any, w: Any, mesh: Any) -> Any:
    """The ops under the functions, of groups by name, which count ranks within the group."""
    name, n = _group(mesh).group_name, _count(mesh)
    ops, wait = torch.ops._c10d_functional, functional.wait_tensor
    derived = torch.ops._c10d_functional_autograd
    total, first = x.clone(), x.clone()
    wait(ops.all_reduce_(total, "sum", name))
    wait(ops.broadcast_(first, 0, name))
    narrow = x.to(torch.float32)  # a copy, which may be overwritten
    dist.all_reduce(narrow, op=Op.MAX)
    parts = [4 // n] * n
    found = (
        ops.broadcast(x, n - 1, name),
        ops.broadcast.default(w, 1, name),
        functional.broadcast(x, n - 1, _group(mesh)),
        *ops.all_gather_into_tensor_coalesced([x, w], n, name),
        *ops.reduce_scatter_tensor_coalesced([x, w], "sum", n, name),
        derived.all_gather_into_tensor(x, n, name),
        derived.reduce_scatter_tensor(x, "sum", n, name),
        derived.all_to_all_single(x, parts, parts, name),
    )
    return total, first, narrow, [wait(y) for y in found]


BY_HAND: dict[str, Program] = {
    fn.__name__: fn
    for fn in (listed, by_ops, by_ops_of_names, on_one, coalesced, autograd_forms, queried)
}


def loss_of_forms(x: Any, w: Any, mesh: Any) -> Any:
    first = dist.get_rank() == 0
    sent = [w * (k + 1) for k in range(dist.get_world_size())]
    weight = dist.get_rank() + 1
    found = (
        forms.all_reduce(x),
        *forms.all_gather(x.cos()),
        forms.broadcast(x * 2, 1),
        *forms.gather(x.exp(), 1),
        forms.scatter(sent, 1),
        forms.reduce(x, 0) * first,
        forms.all_to_all_single(torch.empty_like(x), x.sin()),
    )
    return sum((weight * (k + 1) * y.square()).sum() for k, y in enumerate(found))


def loss_of_lists(x: Any, w: Any, mesh: Any) -> Any:
    """Of collectives that have no derivative in eager torch, by those that have."""
    n, group = _count(mesh), _group(mesh)
    every = [torch.empty_like(x) for _ in range(n)]
    dist.all_gather(every, x * 2, group=group)
    product, largest = x.exp(), w * 1
    dist.all_reduce(product, op=Op.PRODUCT, group=group)
    dist.all_reduce(largest, op=Op.MAX, group=group)
    weight = dist.get_rank() + 1
    found = (torch.stack(every), product, largest)
    return sum((weight * (k + 1) * y.sin()).sum() for k, y in enumerate(found))


def loss_of_lists_by_sums(x: Any, w: Any, mesh: Any) -> Any:
    """`loss_of_lists`, of an all-gather with a derivative."""
    group = _group(mesh)
    gather = functional.all_gather_tensor_autograd
    rows = gather(x[None] * 2, 0, group)
    product = gather(x[None].exp(), 0, group).prod(0)
    largest = gather(w[None], 0, group).amax(0)
    weight = dist.get_rank() + 1
    found = (rows, product, largest)
    return sum((weight * (k + 1) * y.sin()).sum() for k, y in enumerate(found))
