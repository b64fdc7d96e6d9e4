"""Functions of one rank's tensors that use DTensor and torch.distributed, for eager torch and for
`jit`.

Each takes a rank's own tensors x (4, 6) and w (6, 2), which differ from rank to rank, and a mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

Program = Callable[[torch.Tensor, torch.Tensor, Any], Any]


def own(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensors of one rank."""
    made = torch.Generator().manual_seed(rank)
    draw = lambda *shape: torch.randn(shape, generator=made, dtype=torch.float64)
    return draw(4, 6), draw(6, 2)


def last(mesh: Any, placement: Any) -> list[Any]:
    """A placement on the last axis, and replicated on the others."""
    return [Replicate()] * (mesh.ndim - 1) + [placement]


def every(mesh: Any, placement: Any) -> list[Any]:
    """A placement on each axis."""
    return [placement] * mesh.ndim


def positional(x: Any, w: Any, mesh: Any) -> Any:
    d = DTensor.from_local(x, mesh, every(mesh, Shard(0)))
    return d.redistribute(mesh, every(mesh, Replicate())).to_local() + 2


def keywords(x: Any, w: Any, mesh: Any) -> Any:
    d = DTensor.from_local(
        local_tensor=x, device_mesh=mesh, placements=every(mesh, Shard(1)), run_check=False
    )
    d = d.redistribute(device_mesh=mesh, placements=every(mesh, Replicate()))
    return d.to_local(grad_placements=every(mesh, Replicate())) + 2


def of_terms(x: Any, w: Any, mesh: Any) -> Any:
    d = DTensor.from_local(x, mesh, every(mesh, Partial()))
    return d.redistribute(mesh, last(mesh, Shard(1))).to_local()


def of_means(x: Any, w: Any, mesh: Any) -> Any:
    d = DTensor.from_local(x, mesh, every(mesh, Partial("avg")))
    return d.full_tensor()


def of_largest(x: Any, w: Any, mesh: Any) -> Any:
    d = DTensor.from_local(x, mesh, every(mesh, Partial("max")))
    return d.redistribute(mesh, every(mesh, Replicate())).to_local()


def of_first(x: Any, w: Any, mesh: Any) -> Any:
    d = DTensor.from_local(x, mesh, every(mesh, Replicate()), run_check=True)
    return (d * 2).to_local()


def with_sizes(x: Any, w: Any, mesh: Any) -> Any:
    shape = (4 * mesh.size(), 6)
    d = DTensor.from_local(x, mesh, every(mesh, Shard(0)), shape=torch.Size(shape), stride=(6, 1))
    return d.to_local() * d.shape[0] + d.stride()[0]


def asynchronous(x: Any, w: Any, mesh: Any) -> Any:
    d = DTensor.from_local(x, mesh, every(mesh, Shard(0)))
    first = d.redistribute(mesh, every(mesh, Replicate()), async_op=True)
    return first.to_local().cos() + 1


def transposed(x: Any, w: Any, mesh: Any) -> Any:
    d = DTensor.from_local(x, mesh, every(mesh, Shard(0)))
    return d.t().to_local(), d.redistribute(mesh, last(mesh, Shard(1))).t().to_local()


def moved(x: Any, w: Any, mesh: Any) -> Any:
    d = DTensor.from_local(x, mesh, last(mesh, Shard(-1)), run_check=True)
    return d.redistribute(mesh, last(mesh, Shard(0))).to_local()


def product_of_terms(x: Any, w: Any, mesh: Any) -> Any:
    a = DTensor.from_local(x, mesh, every(mesh, Partial()))
    b = distribute_tensor(w, mesh, every(mesh, Replicate()))
    return (a @ b).full_tensor()


def contracted(x: Any, w: Any, mesh: Any) -> Any:
    a = DTensor.from_local(x, mesh, last(mesh, Shard(1)), run_check=True)
    b = DTensor.from_local(w, mesh, last(mesh, Shard(0)), run_check=True)
    y = a @ b
    return y.full_tensor(), [str(p) for p in y.placements]


def computed(x: Any, w: Any, mesh: Any) -> Any:
    d = DTensor.from_local(x, mesh, every(mesh, Shard(0)))
    y = F.softmax(F.layer_norm(d, (6,)), -1).relu()
    z = y.to_local()
    return z, y.placements[0].is_shard(0), y.placements, isinstance(y, DTensor)


def attributes(x: Any, w: Any, mesh: Any) -> Any:
    d = DTensor.from_local(x, mesh, every(mesh, Shard(0)))
    kinds = isinstance(x, DTensor), isinstance(d, torch.Tensor)
    return d.to_local() * d.numel() + d.size(0), kinds, d.placements[-1].dim


def distributed(x: Any, w: Any, mesh: Any) -> Any:
    d = distribute_tensor(x, mesh, last(mesh, Shard(1)))
    return d.to_local(), distribute_tensor(w, mesh, every(mesh, Replicate())).sum().to_local()


def returned(x: Any, w: Any, mesh: Any) -> Any:
    d = DTensor.from_local(x, mesh, every(mesh, Shard(0)))
    return {"sharded": d * 2, "replicated": d.redistribute(mesh, every(mesh, Replicate()))}


def of_a_part(x: Any, w: Any, mesh: Any) -> Any:
    part = mesh[mesh.mesh_dim_names[-1]]
    d = DTensor.from_local(x, part, [Shard(0)])
    return d.redistribute(part, [Replicate()]).to_local() + x[0]


def tensor_parallel(x: Any, w: Any, mesh: Any) -> Any:
    a = distribute_tensor(x, mesh, every(mesh, Replicate()))
    up = DTensor.from_local(w, mesh, last(mesh, Shard(1)), run_check=True)
    down = DTensor.from_local(w.t(), mesh, last(mesh, Shard(0)), run_check=True)
    return (F.gelu(a @ up) @ down).full_tensor()


def sequence_parallel(x: Any, w: Any, mesh: Any) -> Any:
    a = DTensor.from_local(x, mesh, last(mesh, Shard(0)), run_check=True)
    up = DTensor.from_local(w, mesh, last(mesh, Shard(1)), run_check=True)
    down = DTensor.from_local(w.t(), mesh, last(mesh, Shard(0)), run_check=True)
    whole = a.redistribute(mesh, every(mesh, Replicate()))
    y = F.gelu(whole @ up) @ down
    return y.redistribute(mesh, last(mesh, Shard(0))).to_local()


def embedded(x: Any, w: Any, mesh: Any) -> Any:
    rows = DTensor.from_local(w, mesh, last(mesh, Shard(0)), run_check=True)
    index = distribute_tensor(torch.arange(5) + 1, mesh, every(mesh, Replicate()))
    return F.embedding(index, rows).full_tensor()


def checkpointed(x: Any, w: Any, mesh: Any) -> Any:
    d = DTensor.from_local(x, mesh, every(mesh, Shard(0)))

    def inner(d: Any) -> Any:
        return d.redistribute(mesh, every(mesh, Replicate())).sin().sum()

    y = torch.utils.checkpoint.checkpoint(inner, d, use_reentrant=False)
    return y.redistribute(mesh, every(mesh, Replicate())).to_local()


def all_reduced(x: Any, w: Any, mesh: Any) -> Any:
    total, largest = x * 2, x.clone()
    dist.all_reduce(total)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group(mesh.ndim - 1))
    return total, largest


def waited(x: Any, w: Any, mesh: Any) -> Any:
    total = x * 2
    work = dist.all_reduce(total, async_op=True)
    work.wait()
    return total + 1


def gathered(x: Any, w: Any, mesh: Any) -> Any:
    group = mesh.get_group(mesh.ndim - 1)
    n = mesh.size(mesh.ndim - 1)
    out = x.new_empty(4 * n, 6)
    dist.all_gather_into_tensor(out, x, group=group)
    return out


def scattered(x: Any, w: Any, mesh: Any) -> Any:
    out = x.new_empty(4 // mesh.size(mesh.ndim - 1), 6)
    dist.reduce_scatter_tensor(out, x, group=mesh.get_group(mesh.ndim - 1))
    return out


def exchanged(x: Any, w: Any, mesh: Any) -> Any:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=mesh.get_group(mesh.ndim - 1))
    return out


def broadcast(x: Any, w: Any, mesh: Any) -> Any:
    y, z = x.clone(), w > 0
    dist.broadcast(y, 1)
    dist.broadcast(z, group=mesh.get_group(mesh.ndim - 1), group_src=1)
    return y, z


def functions(x: Any, w: Any, mesh: Any) -> Any:
    group = mesh.get_group(mesh.ndim - 1)
    return (
        functional.all_reduce(x, "sum", group),
        functional.all_reduce(x, "sum", (mesh, mesh.ndim - 1)),
        functional.all_gather_tensor(x, 1, group),
        functional.reduce_scatter_tensor(x, "sum", 0, group),
        functional.all_to_all_single(x, None, None, group),
        functional.broadcast(x, 0, mesh if mesh.ndim == 1 else dist.group.WORLD),
    )


def mapped(x: Any, w: Any, mesh: Any) -> Any:
    """The example of torch's local_map: a row-wise product with a reduction by hand."""

    def product(a: Any, b: Any) -> Any:
        return functional.all_reduce(a @ b, "sum", (mesh, mesh.ndim - 1))

    local = local_map(
        product,
        out_placements=(every(mesh, Replicate()),),
        in_placements=(last(mesh, Shard(1)), last(mesh, Shard(0))),
        device_mesh=mesh,
    )
    a = distribute_tensor(x, mesh, last(mesh, Shard(1)))
    b = distribute_tensor(w, mesh, last(mesh, Shard(0)))
    return local(a, b)


def mapped_after_redistribution(x: Any, w: Any, mesh: Any) -> Any:
    local = local_map(
        lambda a, n: (a * n).sin(),
        out_placements=last(mesh, Shard(0)),
        in_placements=(last(mesh, Shard(0)), None),
        redistribute_inputs=True,
    )
    return local(distribute_tensor(x, mesh, last(mesh, Shard(1))), 3)


def filled(x: Any, w: Any, mesh: Any) -> Any:
    make = torch.distributed.tensor.full
    d = make((8, 6), 2.5, device_mesh=mesh, placements=every(mesh, Shard(0)))
    return d.to_local() + mesh.get_group(0).rank()


def ranks(x: Any, w: Any, mesh: Any) -> Any:
    name = mesh.mesh_dim_names[-1]
    place = mesh.get_coordinate()
    mine = mesh.get_local_rank(name) + 10 * dist.get_rank() + 100 * place[0]
    return x * mine, mesh.size() + mesh.ndim, mesh.shape, mesh[name].size()


def terms(x: Any, w: Any, mesh: Any) -> Any:
    """Each rank's term of Partial DTensors."""
    d = DTensor.from_local(x, mesh, every(mesh, Partial()))
    rows = DTensor.from_local(x, mesh, every(mesh, Shard(0)))
    a = DTensor.from_local(x.clone(), mesh, last(mesh, Shard(1)), run_check=True)
    b = DTensor.from_local(w.clone(), mesh, last(mesh, Shard(0)), run_check=True)
    kinds = [
        DTensor.from_local(x.clone(), mesh, last(mesh, Partial(k)), run_check=True)
        for k in ("avg", "max")
    ]
    both = [d, d * 3, rows.sum(), rows.sum(0), rows.amax(0), a @ b, (a @ b).t(), *kinds]
    return [y.to_local() for y in both]


def partial_results(x: Any, w: Any, mesh: Any) -> Any:
    d = DTensor.from_local(x, mesh, every(mesh, Partial()))
    rows = DTensor.from_local(x, mesh, every(mesh, Shard(0)))
    a = DTensor.from_local(x.clone(), mesh, last(mesh, Shard(1)), run_check=True)
    b = DTensor.from_local(w.clone(), mesh, last(mesh, Shard(0)), run_check=True)
    mean = DTensor.from_local(x.clone(), mesh, last(mesh, Partial("avg")), run_check=True)
    return {
        "term": d,
        "scaled": d / 2,
        "sum": rows.sum(),
        "rows": rows.square().sum(0),
        "largest": rows.amax(0),
        "product": a @ b,
        "mean": mean,
    }


PROGRAMS: dict[str, Program] = {
    fn.__name__: fn
    for fn in (
        positional,
        keywords,
        of_terms,
        of_means,
        of_largest,
        of_first,
        with_sizes,
        asynchronous,
        transposed,
        moved,
        product_of_terms,
        contracted,
        computed,
        attributes,
        distributed,
        returned,
        of_a_part,
        tensor_parallel,
        sequence_parallel,
        embedded,
        checkpointed,
        all_reduced,
        waited,
        gathered,
        scattered,
        exchanged,
        broadcast,
        functions,
        mapped,
        mapped_after_redistribution,
        filled,
        ranks,
        terms,
        partial_results,
    )
}


def loss_of_rows(x: Any, w: Any, mesh: Any) -> Any:
    d = DTensor.from_local(x, mesh, every(mesh, Shard(0)))
    same = d.redistribute(mesh, every(mesh, Replicate()))
    return (same.to_local(grad_placements=every(mesh, Partial()))[:6] @ w).square().sum()


def loss_of_rows_unsaid(x: Any, w: Any, mesh: Any) -> Any:
    """`loss_of_rows` without grad_placements: eager torch takes the cotangent for one that all
    ranks have, and is silently wrong if they have other tensors w.
    """
    d = DTensor.from_local(x, mesh, every(mesh, Shard(0)))
    same = d.redistribute(mesh, every(mesh, Replicate()))
    return (same.to_local()[:6] @ w).square().sum()


def loss_of_equal_rows(x: Any, w: Any, mesh: Any) -> Any:
    """`loss_of_rows_unsaid` that says what eager torch takes for granted."""
    d = DTensor.from_local(x, mesh, every(mesh, Shard(0)))
    same = d.redistribute(mesh, every(mesh, Replicate()))
    return (same.to_local(grad_placements=same.placements)[:6] @ w).square().sum()


def loss_of_terms(x: Any, w: Any, mesh: Any) -> Any:
    d = DTensor.from_local(x @ w, mesh, every(mesh, Partial()))
    return d.redistribute(mesh, every(mesh, Replicate())).to_local().square().sum()


def loss_of_shards(x: Any, w: Any, mesh: Any) -> Any:
    d = DTensor.from_local(x, mesh, every(mesh, Shard(0)))
    return (d.sin().to_local() @ w).square().sum()


def loss_of_replicas(x: Any, w: Any, mesh: Any) -> Any:
    """Of a tensor that all ranks have, which becomes a DTensor again."""
    d = DTensor.from_local(x, mesh, every(mesh, Shard(0)))
    again = DTensor.from_local(d.full_tensor(), mesh, every(mesh, Replicate()))
    same = DTensor.from_local(w, mesh, every(mesh, Replicate()))
    return (again.sin() @ same).square().sum().full_tensor()


def loss_of_own_terms(x: Any, w: Any, mesh: Any) -> Any:
    d = DTensor.from_local(x @ w, mesh, every(mesh, Partial()))
    return d.to_local().square().sum()


def loss_in_dtypes(x: Any, w: Any, mesh: Any) -> Any:
    """Thirds are rounded where a gradient is redistributed, and sums of them are exact."""
    total = 0.0
    d = DTensor.from_local(x, mesh, every(mesh, Shard(0)))
    own_third = (x.detach() > 99).to(x.dtype) + 1 / 3  # each rank's own
    third = torch.cat([own_third] * mesh.size())
    dtypes = None, torch.float32, torch.bfloat16
    for first in dtypes:
        for second in dtypes:
            same = d.redistribute(
                mesh, every(mesh, Replicate()), forward_dtype=first, backward_dtype=second
            )
            own = same.to_local(grad_placements=every(mesh, Partial()))
            total = total + (own * third).sum()
    return total + w.sum()


def loss_in_one_dtype(x: Any, w: Any, mesh: Any) -> Any:
    d = DTensor.from_local(x, mesh, every(mesh, Shard(0)))
    to = last(mesh, Shard(1))
    d = DTensor.redistribute(d * 3, mesh, to, backward_dtype=torch.float32)
    e = DTensor.from_local(w, mesh, every(mesh, Shard(0)))
    return ((d * d).sum() + e.sum()).full_tensor()


LOSSES: dict[str, Program] = {
    fn.__name__: fn
    for fn in (
        loss_of_rows,
        loss_of_terms,
        loss_of_own_terms,
        loss_of_shards,
        loss_of_replicas,
        loss_in_dtypes,
        loss_in_one_dtype,
    )
}
