"""Scripts of plain torch with DTensors, outside of any function, for both worlds."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor as dt
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardfn as sf
from shardfn import P

F64 = torch.float64
X = torch.linspace(-1, 2, 15, dtype=F64).view(5, 3)  # rows are uneven over 2 and over 4
W = torch.linspace(2, -1, 12, dtype=F64).view(3, 4)
Script = Callable[[Any, DTensor, DTensor], Any]  # of a mesh, X over rows, W over columns


def inputs(mesh: Any) -> tuple[DTensor, DTensor]:
    """X over the rows and W over the columns of a mesh, by its last axis."""
    axis = mesh.mesh_dim_names[-1]
    return sf.distribute((X, W), mesh, (P(axis), P(None, axis)))


def _written(fn: Callable[[DTensor, DTensor], Any]) -> Script:
    """A script that writes into a copy of X, and returns the copy."""

    def script(mesh: Any, x: DTensor, w: DTensor) -> Any:
        y = x.clone()
        fn(y, x)
        return y

    return script


def _gradient(fn: Callable[[Any, DTensor, DTensor], torch.Tensor]) -> Script:
    """A script that returns the gradients of a loss with respect to X and W."""

    def script(mesh: Any, x: DTensor, w: DTensor) -> Any:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        fn(mesh, x, w).backward()
        return x.grad, w.grad

    return script


def _trained(make: Callable[[list[Any]], torch.optim.Optimizer]) -> Script:
    """A script that takes three steps of an optimizer, with clipping and a schedule."""

    def script(mesh: Any, x: DTensor, w: DTensor) -> Any:
        p = nn.Parameter(w.clone())
        optimizer = make([p])
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        norms = []
        for _ in range(3):
            (x @ p).square().sum().backward()
            norms.append(nn.utils.clip_grad_norm_([p], 1.0))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return p.detach(), norms

    return script


def _local_sum(mesh: Any, x: DTensor, w: DTensor) -> torch.Tensor:
    placed = x.redistribute(placements=[Replicate()] * mesh.ndim)
    return (placed.to_local() * torch.arange(3.0, dtype=F64)).sum() + (w * w).sum().full_tensor()


def _uneven_sums(mesh: Any, x: DTensor, w: DTensor) -> torch.Tensor:
    """A loss of local tensors of 3 and of 2 rows, which is each rank's own."""
    own, columns = x.to_local(), w.to_local()
    twice = torch.cat([own.sin(), own])
    by_columns = [Replicate()] * (mesh.ndim - 1) + [Shard(1)]
    strided = x.redistribute(placements=by_columns).to_local()  # (5, 2), (5, 1)
    sums = own[1:].sum() + columns.exp().sum() + strided.cos().sum()
    return twice.square().mean() + sums


def _made_of_own(mesh: Any, x: DTensor, w: DTensor) -> torch.Tensor:
    """DTensors made of local tensors, whose gradients arrive replicated."""
    rows, columns = x.to_local() ** 2, w.to_local() * 2
    made = DTensor.from_local(columns, mesh, w.placements).cumsum(1)
    again = DTensor.from_local(rows, mesh, x.placements, shape=x.shape, stride=x.stride())
    return made.sin().sum().full_tensor() + again.sum().full_tensor()


def _saved(x: DTensor) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)  # which loads weights alone


def _checkpointed(mesh: Any, x: DTensor, w: DTensor) -> Any:
    with tempfile.TemporaryDirectory() as own:
        folder = _of_rank_0(own)
        dcp.save({"x": x, "deep": {"w": w}, "step": 3}, checkpoint_id=folder)
        other = [Replicate()] * (mesh.ndim - 1) + [Shard(1)]
        like = torch.zeros_like(x).redistribute(placements=other)
        state = {"x": like, "deep": {"w": torch.zeros_like(w)}, "step": 0}
        dcp.load(state, checkpoint_id=folder)
        _of_rank_0(own)  # until all have read, no folder is removed
    return state


def _of_rank_0(text: str) -> str:
    """Rank 0's text, on all ranks of a real world."""
    if torch.distributed.get_backend() == "fake":
        return text
    box = [text]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def _steps(net: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    """Two steps of training, recomputed: the norm of the gradients, and the parameters."""
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    norm = batch.new_zeros(())
    for _ in range(2):
        y: Any = torch.utils.checkpoint.checkpoint(net, batch, use_reentrant=False)
        y.square().mean().backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    parameters = [p.detach() for p in net.parameters()]
    return [norm, *parameters]


def _net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).to(F64)


def _fully_sharded(mesh: Any, x: DTensor, w: DTensor) -> Any:
    net = _net()
    fully_shard([net[0], net[2]], mesh=mesh)
    fully_shard(net, mesh=mesh)
    return _steps(net, x.to_local()[:2])


def _of_two_axes(mesh: Any, x: DTensor, w: DTensor) -> Any:
    if mesh.ndim == 1:
        return None
    net = _net()
    layers = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(net, mesh["tp"], layers)
    fully_shard(net, mesh=mesh["dp"])
    return _steps(net, X)


def _parallel(mesh: Any, x: DTensor, w: DTensor) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    axis = mesh.mesh_dim_names[-1]
    parallelize_module(net, mesh[axis] if mesh.ndim > 1 else mesh, plan)
    loss = net(X).square().sum()
    loss.backward()
    return loss.detach(), [p.grad for p in net.parameters()]


def _moved(*to: Any) -> Script:
    """X redistributed over the last axis."""

    def script(mesh: Any, x: DTensor, w: DTensor) -> Any:
        first = [Replicate()] * (mesh.ndim - 1)
        for place in to:
            x = x.redistribute(mesh, [*first, place])
        return x

    return script


def _plain_reduced(mesh: Any, x: DTensor, w: DTensor) -> Any:
    """Collectives of tensors that all ranks have, which stay so."""
    group = mesh.get_group(mesh.ndim - 1)
    n = group.size()
    total, mean, largest, root = (X.clone() for _ in range(4))
    dist.all_reduce(total)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=group)
    work = dist.all_reduce(largest, op=dist.ReduceOp.MAX, async_op=True)
    work.wait()
    dist.reduce(root, 0)
    root = root if dist.get_rank() == 0 else total
    every = [torch.empty_like(X) for _ in range(n)]
    dist.all_gather(every, X, group=group)
    rows, ones = X.new_empty(5 * n, 3), torch.ones(n, 3)
    dist.all_gather_into_tensor(rows, X, group=group)
    chunk, sent = ones.new_empty(1, 3), torch.empty_like(ones)
    dist.reduce_scatter_tensor(chunk, ones, group=group)
    dist.all_to_all_single(sent, ones, group=group)
    dist.broadcast(mean, 0)
    objects = [None] * dist.get_world_size()
    dist.all_gather_object(objects, {"step": 3})
    by_name = functional.all_reduce(X, "sum", group) + functional.all_gather_tensor(
        X[:1], 0, group
    ).sum(0)
    found = [total, mean, largest, root, every, rows, chunk, sent, by_name]
    return found, objects


def _own_reduced(mesh: Any, x: DTensor, w: DTensor) -> Any:
    """Collectives of tensors of which each rank has its own."""
    group = mesh.get_group(mesh.ndim - 1)
    n = group.size()
    own = w.to_local().t().contiguous()  # (4 / n, 3)
    total, first = own.clone(), own.clone()
    dist.all_reduce(total, group=group)
    dist.broadcast(first, 0)
    every = [torch.empty_like(own) for _ in range(n)]
    dist.all_gather(every, own, group=group)
    sent = [own * (k + 1) for k in range(n)]
    received = [torch.empty_like(own) for _ in range(n)]
    dist.all_to_all(received, sent, group=group)
    chunk, parts = torch.empty_like(own), torch.empty(n * 4 // n, 3, dtype=F64)
    dist.reduce_scatter(chunk, sent, op=dist.ReduceOp.MAX, group=group)
    dist.all_gather_into_tensor(parts, own, group=group)
    rows = own.repeat(n, 1)
    swapped, piece = torch.empty_like(rows), torch.empty_like(own)
    dist.all_to_all_single(swapped, rows, group=group)
    dist.reduce_scatter_tensor(piece, rows, group=group)
    by_name = [
        functional.all_reduce(own, "sum", group) + 0,
        functional.all_gather_tensor(own, 0, group) + 0,
        functional.reduce_scatter_tensor(rows, "sum", 0, group) + 0,
        functional.all_to_all_single(rows, None, None, group) + 0,
        functional.broadcast(own, n - 1, group) + 0,
    ]
    found = [total, first, every, received, chunk, parts, swapped, piece]
    return found, by_name


def _all(mesh: Any, place: Any) -> list[Any]:
    return [place] * mesh.ndim


SCRIPTS: dict[str, Script] = {
    "collectives of plain tensors": _plain_reduced,
    "collectives of local tensors": _own_reduced,
    "full_tensor": lambda mesh, x, w: x.full_tensor(),
    "to_local": lambda mesh, x, w: x.to_local(),
    "rows to columns": _moved(Shard(1)),
    "rows to all": _moved(Replicate()),
    "all to rows": _moved(Replicate(), Shard(0)),
    "a sum to all": lambda mesh, x, w: x.sum(0).full_tensor(),
    "a sum to rows": lambda mesh, x, w: x.sum(0).redistribute(placements=_all(mesh, Shard(0))),
    "add": lambda mesh, x, w: x + x,
    "a number": lambda mesh, x, w: 2 * x - 1,
    "relu": lambda mesh, x, w: torch.relu(x),
    "softmax": lambda mesh, x, w: torch.softmax(x, 0),
    "matmul": lambda mesh, x, w: x @ w,
    "sum": lambda mesh, x, w: x.sum(),
    "mean": lambda mesh, x, w: x.mean().full_tensor(),
    "var": lambda mesh, x, w: x.var(0),
    "norm": lambda mesh, x, w: x.norm().full_tensor(),
    "max of columns": lambda mesh, x, w: x.max(1),
    "argmax": lambda mesh, x, w: x.argmax(1),
    "where": lambda mesh, x, w: torch.where(x > 0, x, -x),
    "cat": lambda mesh, x, w: torch.cat([x, x], 1),
    "row": lambda mesh, x, w: x[1],
    "slice": lambda mesh, x, w: x[:, 1:],
    "transpose": lambda mesh, x, w: x.t(),
    "reshape": lambda mesh, x, w: w.reshape(3, 2, 2),
    "expand": lambda mesh, x, w: w.sum().expand(5, 2),
    "cumsum": lambda mesh, x, w: x.cumsum(1),
    "sort": lambda mesh, x, w: x.sort(1),
    "zeros_like": lambda mesh, x, w: torch.zeros_like(x),
    "new_full": lambda mesh, x, w: x.new_full((5, 2), 3.0),
    "to float32": lambda mesh, x, w: x.to(torch.float32),
    "add_": _written(lambda y, x: y.add_(x)),
    "mul_": _written(lambda y, x: y.mul_(3)),
    "copy_": _written(lambda y, x: y.copy_(x * 2)),
    "out=": _written(lambda y, x: torch.mul(x, x, out=y)),
    "_foreach_add_": _written(lambda y, x: torch._foreach_add_([y], [x])),
    "a view is written": _written(lambda y, x: y[:, 1:].zero_()),
    "a number is read": lambda mesh, x, w: x.sum().full_tensor().item(),
    "a mean is read": lambda mesh, x, w: x.square().mean().item(),
    "a comparison is read": lambda mesh, x, w: bool((x < 5).all()),
    "a float": lambda mesh, x, w: f"{float(x.sum().full_tensor()):.3f}",
    "print": lambda mesh, x, w: _of_rank_0(str(x)),
    "shape": lambda mesh, x, w: (tuple(x.shape), x.stride(), str(x.dtype)),
    "deepcopy": lambda mesh, x, w: copy.deepcopy(x) + 1,
    "pickle": lambda mesh, x, w: pickle.loads(pickle.dumps(x)) + 1,
    "save and load": lambda mesh, x, w: _saved(x) + 1,
    "checkpoint": _checkpointed,
    "gradient of a sum": _gradient(lambda mesh, x, w: (x * x).sum()),
    "gradient of a matmul": _gradient(lambda mesh, x, w: (x @ w).exp().sum()),
    "gradient of full_tensor": _gradient(lambda mesh, x, w: ((x @ w).full_tensor() ** 2).sum()),
    "gradient through to_local": _gradient(_local_sum),
    "gradient of uneven local tensors": _gradient(_uneven_sums),
    "gradient of from_local": _gradient(_made_of_own),
    "sgd": _trained(lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9)),
    "adamw": _trained(lambda ps: torch.optim.AdamW(ps, 0.1)),
    "adamw, one by one": _trained(lambda ps: torch.optim.AdamW(ps, 0.1, foreach=False)),
    "from_local": lambda mesh, x, w: DTensor.from_local(X, mesh, _all(mesh, Shard(0))),
    "from_local of a term": lambda mesh, x, w: DTensor.from_local(
        X, mesh, _all(mesh, Partial())
    ).full_tensor(),
    "distribute_tensor by rows": lambda mesh, x, w: dt.distribute_tensor(
        X, mesh, _all(mesh, Shard(0))
    ),
    "distribute_tensor to all": lambda mesh, x, w: dt.distribute_tensor(
        X, mesh, _all(mesh, Replicate())
    ),
    "zeros": lambda mesh, x, w: dt.zeros(5, 3, device_mesh=mesh, placements=_all(mesh, Shard(0))),
    "full": lambda mesh, x, w: dt.full(
        (5, 3), 2.5, device_mesh=mesh, placements=_all(mesh, Shard(1))
    ),
    "tensor parallel": _parallel,
    "fully_shard": _fully_sharded,
    "fully_shard of tensor parallel": _of_two_axes,
    "a plain tensor beside it": lambda mesh, x, w: x + X,
    "numpy": lambda mesh, x, w: x.numpy(),
    "tolist": lambda mesh, x, w: x.tolist(),
    "allclose": lambda mesh, x, w: torch.allclose(x, x),
    "uneven rows flattened": lambda mesh, x, w: x.reshape(15),
}


def answer(name: str, mesh: Any) -> Any:
    """The answer of a script, or that it is refused, by torch or by name."""
    try:
        return SCRIPTS[name](mesh, *inputs(mesh))
    except (RuntimeError, TypeError, ValueError, AssertionError, sf.ShardError):
        return "refused"


def of_rank(found: Any, rank: int) -> Any:
    """An answer as one rank sees it: local tensors for tensors, placements beside them."""
    if isinstance(found, DTensor):
        local = found.detach().to_local()
        return str(found.placements), tuple(found.shape), of_rank(local, rank)
    if isinstance(found, torch.Tensor):
        shards = getattr(found, "shards", [found])
        return shards[rank % len(shards)].detach().clone()
    if isinstance(found, list | tuple):
        return [of_rank(x, rank) for x in found]
    if isinstance(found, dict):
        return {key: of_rank(x, rank) for key, x in found.items()}
    return found
