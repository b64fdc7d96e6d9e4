"""Code of one rank with shards of different sizes. Each program takes x and w of this rank, and
the mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

Program = Callable[[Any, Any, Any], Any]


def same() -> tuple[torch.Tensor, torch.Tensor]:
    """The tensors of the programs, the same on all ranks."""
    g = torch.Generator().manual_seed(3)
    shapes = (7, 6), (6, 5)
    x, w = (torch.randn(s, generator=g, dtype=torch.float64) for s in shapes)
    return x, w


def rows(mesh: Any, placement: Any) -> list[Any]:
    """The placements that shard over the first axis."""
    return [placement] + [Replicate()] * (mesh.ndim - 1)


def again(y: Any, like: Any) -> Any:
    """The DTensor of local tensors."""
    shape, stride = like.shape, like.stride()
    return DTensor.from_local(y, like.device_mesh, like.placements, shape=shape, stride=stride)


def taken_apart(x: Any, w: Any, mesh: Any) -> Any:
    d = distribute_tensor(x, mesh, rows(mesh, Shard(0)))
    y = d.to_local()
    return y * 2, y.shape[0], y.sum(), y.mean(), (y @ w).relu()


def every_axis(x: Any, w: Any, mesh: Any) -> Any:
    d = distribute_tensor(x, mesh, [Shard(0)] * mesh.ndim)
    return d.to_local().sin(), d.sum().full_tensor()


def other_dims(x: Any, w: Any, mesh: Any) -> Any:
    dims = [Shard(k % 2) for k in range(mesh.ndim)]
    d = distribute_tensor(w, mesh, dims)
    return d.to_local() + 1, d.t().to_local()


def put_together(x: Any, w: Any, mesh: Any) -> Any:
    d = distribute_tensor(x, mesh, rows(mesh, Shard(0)))
    y = F.softmax(d.to_local() @ w, -1)
    stride = (w.shape[1], 1)
    e = DTensor.from_local(
        y,
        mesh,
        d.placements,
        run_check=False,
        shape=torch.Size((x.shape[0], w.shape[1])),
        stride=stride,
    )
    return e, e.full_tensor(), e.sum().full_tensor()


def redistributed(x: Any, w: Any, mesh: Any) -> Any:
    d = distribute_tensor(x, mesh, rows(mesh, Shard(0)))
    e = again(d.to_local().cos(), d).redistribute(mesh, rows(mesh, Shard(1)))
    return e.to_local(), e.redistribute(mesh, rows(mesh, Shard(0)))


def counted(x: Any, w: Any, mesh: Any) -> Any:
    """The number of rows of all ranks, and a mean over them, by hand."""
    y = distribute_tensor(x, mesh, rows(mesh, Shard(0))).to_local()
    count = torch.tensor(float(y.shape[0]), dtype=x.dtype)
    total = y.sum(0)
    dist.all_reduce(count, group=mesh.get_group(0))
    dist.all_reduce(total, group=mesh.get_group(0))
    return total / count, count, torch.arange(y.shape[0])


def indexed(x: Any, w: Any, mesh: Any) -> Any:
    """Part of a tensor that all ranks have, as long as this rank's shard."""
    y = distribute_tensor(x, mesh, rows(mesh, Shard(0))).to_local()
    part = w[: y.shape[0]].sum()
    twice = part * 2
    dist.all_reduce(twice)
    return part, twice, torch.ones(y.shape[0]).sum()


def padded(x: Any, w: Any, mesh: Any) -> Any:
    """Shards padded to equal size, gathered by hand."""
    y = distribute_tensor(x, mesh, rows(mesh, Shard(0))).to_local()
    n = mesh.size(0)
    full = -(-x.shape[0] // n)
    buffer = x.new_zeros(full, x.shape[1])
    buffer[: y.shape[0]] = y
    out = x.new_empty(n * full, x.shape[1])
    dist.all_gather_into_tensor(out, buffer, group=mesh.get_group(0))
    return out, F.pad(y, (0, 0, 0, full - y.shape[0]))


def mapped(x: Any, w: Any, mesh: Any) -> Any:
    local = local_map(
        lambda a, b: (a @ b).sum(0, keepdim=True),
        out_placements=rows(mesh, Partial()),
        in_placements=(rows(mesh, Shard(0)), rows(mesh, Replicate())),
        device_mesh=mesh,
    )
    a = distribute_tensor(x, mesh, rows(mesh, Shard(0)))
    b = distribute_tensor(w, mesh, rows(mesh, Replicate()))
    return local(a, b).full_tensor()


def few_rows(x: Any, w: Any, mesh: Any) -> Any:
    """Fewer rows than ranks: some have none."""
    d = distribute_tensor(x[: mesh.size(0) - 1], mesh, rows(mesh, Shard(0)))
    y = d.to_local().sin()
    return y, again(y, d).full_tensor()


def own_rows(y: Any, w: Any, mesh: Any) -> Any:
    """Of rows that are this rank's own, as many as its shard has."""
    options = {"shape": (7, 6), "stride": (6, 1)}
    e = DTensor.from_local(y.sin(), mesh, rows(mesh, Shard(0)), **options)
    return e, e.full_tensor(), y.shape[0] * y


def own_sums(y: Any, w: Any, mesh: Any) -> Any:
    """Without a DTensor."""
    total, count = y.sum(0), torch.tensor(y.shape[0])
    dist.all_reduce(total)
    dist.all_reduce(count)
    return total, count, y + 1


def of_argument(d: Any, w: Any, mesh: Any) -> Any:
    y = d.to_local()
    return again((y @ w)[:, :1] * y, d), y.t().contiguous(), d * 2


PROGRAMS: dict[str, Program] = {
    fn.__name__: fn
    for fn in (
        taken_apart,
        every_axis,
        other_dims,
        put_together,
        redistributed,
        counted,
        indexed,
        padded,
        mapped,
        few_rows,
        own_rows,
        own_sums,
        of_argument,
    )
}


def loss_there_and_back(x: Any, w: Any, mesh: Any) -> Any:
    d = DTensor.from_local(x, mesh, rows(mesh, Replicate()))
    d = d.redistribute(mesh, rows(mesh, Shard(0)))
    e = again(d.to_local().sin() * 3, d)
    every = DTensor.from_local(w, mesh, rows(mesh, Replicate()))
    return (e @ every).square().sum().full_tensor()


def loss_of_shards(x: Any, w: Any, mesh: Any) -> Any:
    """A loss of each rank, whose gradients are summed where all have the tensor."""
    d = DTensor.from_local(x, mesh, rows(mesh, Replicate()))
    d = d.redistribute(mesh, rows(mesh, Shard(0)))
    return d.to_local().square().sum()


def loss_of_own_rows(y: Any, w: Any, mesh: Any) -> Any:
    options = {"shape": (7, 6), "stride": (6, 1)}
    e = DTensor.from_local(y, mesh, rows(mesh, Shard(0)), **options)
    every = DTensor.from_local(w, mesh, rows(mesh, Replicate()))
    return (e.tanh() @ every).square().sum().full_tensor()


def loss_of_argument(d: Any, w: Any, mesh: Any) -> Any:
    every = DTensor.from_local(w, mesh, rows(mesh, Replicate()))
    e = again(d.to_local().exp(), d)
    return (e.square() @ every).sum().full_tensor()


LOSSES: dict[str, Program] = {
    fn.__name__: fn
    for fn in (loss_there_and_back, loss_of_shards, loss_of_own_rows, loss_of_argument)
}
ON_TWO_AXES = (
    "every_axis",
    "other_dims",
    "redistributed",
    "indexed",
    "own_rows",
    "loss_of_own_rows",
)
OWN = "own_rows", "own_sums", "loss_of_own_rows"
ARGUMENT = "of_argument", "loss_of_argument"


def own_part(mesh: Any, rank: int) -> torch.Tensor:
    """The rows of x that a rank has."""
    first = mesh.size(0)
    return same()[0].chunk(first)[rank // (mesh.size() // first)].clone()


def argument(name: str, mesh: Any, of_ranks: Callable[..., Any]) -> Any:
    """The first argument of a program.

    Args:
        name: of the program.
        mesh: the mesh.
        of_ranks: of a function of a rank: its value here.
    """
    if name in OWN:
        return of_ranks(lambda rank: own_part(mesh, rank))
    x, _ = same()
    is_placed = name in ARGUMENT
    return distribute_tensor(x, mesh, rows(mesh, Shard(0))) if is_placed else x
