"""Local tensors of one part of a mesh beside those of another: each rank has its own, as under
torchrun, or the call is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardfn as sf

X = torch.arange(4.0, dtype=torch.float64)
Script = Callable[[Any], torch.Tensor]


def _local(mesh: Any, axis: str) -> torch.Tensor:
    return distribute_tensor(X, mesh[axis], [Shard(0)]).to_local()


def _taken(mesh: Any, of: str, by: str) -> torch.Tensor:
    return DTensor.from_local(_local(mesh, of), mesh[by], [Shard(0)]).full_tensor()


def _sum(mesh: Any) -> torch.Tensor:
    return _local(mesh, "dp") + _local(mesh, "tp")


def _sum_on(mesh: Any, axis: str) -> torch.Tensor:
    return DTensor.from_local(_sum(mesh), mesh[axis], [Shard(0)]).full_tensor()


def _on_both(mesh: Any) -> torch.Tensor:
    return DTensor.from_local(_sum(mesh), mesh, [Shard(0), Shard(0)]).full_tensor()


def _with_the_mesh(mesh: Any) -> torch.Tensor:
    return _local(mesh, "tp") * distribute_tensor(X, mesh, [Shard(0), Replicate()]).to_local()


def _all_reduced(mesh: Any) -> torch.Tensor:
    y = _local(mesh, "dp").clone()
    torch.distributed.all_reduce(y, group=mesh["dp"].get_group())
    return y


def _written(mesh: Any) -> torch.Tensor:
    x = distribute_tensor(X, mesh["tp"], [Shard(0)])
    x.to_local().mul_(2)
    return x.full_tensor() + x.to_local().sum()


def _read_after_writes(mesh: Any) -> torch.Tensor:
    x = distribute_tensor(X, mesh["tp"], [Shard(0)])
    first, second = x.to_local(), x.to_local()
    view = second[1:]
    first.mul_(2)
    x.add_(1)
    first[1:].copy_(torch.full((1,), 7.0, dtype=torch.float64))
    return first + 10 * second + 100 * view


def _written_by_others(mesh: Any, write: Callable[[Any, Any], Any]) -> torch.Tensor:
    x = distribute_tensor(X, mesh["tp"], [Shard(0)])
    write(x.to_local(), _local(mesh, "dp"))
    return x.to_local()


def _gradient(mesh: Any) -> torch.Tensor:
    x = distribute_tensor(X, mesh["tp"], [Shard(0)]).requires_grad_()
    (x.to_local() * x.to_local()).sum().backward()
    return x.grad.full_tensor()


def _gradient_of_others(mesh: Any) -> torch.Tensor:
    x = distribute_tensor(X, mesh["tp"], [Shard(0)]).requires_grad_()
    (x.to_local() * _local(mesh, "dp")).sum().backward()
    return x.grad.full_tensor()


def _module(mesh: Any, batch: Callable[[Any, torch.Tensor], torch.Tensor], fsdp: bool) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)).double()
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    if fsdp:
        fully_shard(net, mesh=mesh["dp"])
    x = torch.linspace(-1, 1, 36, dtype=torch.float64).view(6, 6)
    loss = net(batch(mesh, x)).square().mean()
    loss.backward()
    return torch.cat([loss[None], *(p.grad.full_tensor().flatten() for p in net.parameters())])


def _rows_of(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return distribute_tensor(x, mesh["dp"], [Shard(0)]).to_local()


def _same(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return x


RIGHT: dict[str, Script] = {
    "a sum": _sum,
    "a sum on both axes": _on_both,
    "a product with a local tensor of the mesh": _with_the_mesh,
    "taken by its own part": lambda mesh: _taken(mesh, "tp", "tp"),
    "an all-reduce over its part": _all_reduced,
    "written": _written,
    "read after writes": _read_after_writes,
    "a gradient": _gradient,
    "a module of one batch": lambda mesh: _module(mesh, _same, False),
    "a module of fully_shard and of one batch": lambda mesh: _module(mesh, _same, True),
}
REFUSED: dict[str, Script] = {
    "dp taken by tp": lambda mesh: _taken(mesh, "dp", "tp"),
    "tp taken by dp": lambda mesh: _taken(mesh, "tp", "dp"),
    "a sum taken by tp": lambda mesh: _sum_on(mesh, "tp"),
    "a sum taken by dp": lambda mesh: _sum_on(mesh, "dp"),
    "written by others": lambda mesh: _written_by_others(mesh, torch.Tensor.add_),
    "a view written by others": lambda mesh: _written_by_others(
        mesh, lambda x, y: x.detach()[1:].copy_(y[:1])
    ),
    "an out= of others": lambda mesh: _written_by_others(mesh, lambda x, y: torch.add(x, y, out=x)),
    "a gradient that other parts have no equal of": _gradient_of_others,
    "a module of other batches": lambda mesh: _module(mesh, _rows_of, False),
    "a module of fully_shard and of other batches": lambda mesh: _module(mesh, _rows_of, True),
}


def _everything() -> dict[str, torch.Tensor]:
    mesh = sf.make_mesh((2, 2), ("dp", "tp"))
    return {name: script(mesh).detach() for name, script in RIGHT.items()}


@pytest.fixture(scope="module")
def answers() -> list[dict[str, torch.Tensor]]:
    return run_ranks(4, _everything)


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("name", RIGHT)
def test_each_rank_has_its_own_local_tensor_of_a_part(name: str, rank: int, answers: Any) -> None:
    with sf.fake_world(4, rank=rank):
        found: Any = RIGHT[name](sf.make_mesh((2, 2), ("dp", "tp")))
        shards = getattr(found, "shards", None)
        own = {rank: found} if shards is None else dict(enumerate(shards))
        for k, x in own.items():
            torch.testing.assert_close(x.detach(), answers[k][name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("name", REFUSED)
def test_a_part_refuses_local_tensors_that_differ_on_other_parts(name: str, rank: int) -> None:
    with sf.fake_world(4, rank=rank):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        with pytest.raises(sf.PlacementError, match="hold different values"):
            REFUSED[name](mesh)


def test_local_tensors_of_other_ranks_do_not_meet() -> None:
    with sf.fake_world(4):
        one, other = (DeviceMesh("cpu", ranks, mesh_dim_names=("a",)) for ranks in ([0, 1], [2, 3]))
        x, y = (DTensor.from_local(X, mesh, [Shard(0)]) for mesh in (one, other))
        with pytest.raises(
            sf.PlacementError, match=r"ranks \[0, 1\] with local tensors of ranks \[2, 3\]"
        ):
            x.to_local() + y.to_local()
        for take in (DTensor.from_local, sf.from_local):
            with pytest.raises(sf.PlacementError, match=r"ranks \[0, 1\], but the mesh has ranks"):
                take(x.to_local(), other, [Shard(0)])
