"""S7.3: flattened meshes inside the code of one rank, as eager torch answers on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from effort import asked
from ranks import run_ranks
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from worlds import SimulatedTensor

import shardfn as sf

S, R = Shard(0), Replicate()


def own(rank: int) -> torch.Tensor:
    return torch.arange(6.0, dtype=torch.float64).view(2, 3) + 10 * rank


def of_dtensors(x: Any, mesh: Any) -> Any:
    flat = mesh["dp", "tp"]._flatten()
    d = DTensor.from_local(x, flat, [S])
    return d.redistribute(flat, [R]).to_local(), (d * 2).to_local(), d.placements


def of_collectives(x: Any, mesh: Any) -> Any:
    every, tp = x.clone(), x.clone()
    dist.all_reduce(every, group=mesh["dp_tp"].get_group())
    dist.all_reduce(tp, group=mesh["tp"].get_group())
    flat = mesh["dp", "tp"]._flatten("dp_tp")
    return every, tp, flat.size(), flat.mesh_dim_names, x * flat.get_local_rank()


def of_a_slice(x: Any, mesh: Any) -> Any:
    d = DTensor.from_local(x, mesh["dp_tp"], [S])
    total = d.sum().full_tensor()
    dist.all_reduce(x := x.clone(), group=mesh["dp_tp"].get_group())
    return total * 2, x


def made_outside(x: Any, mesh: Any) -> Any:
    return x * mesh._flatten("again").size()


PROGRAMS = (of_dtensors, of_collectives, of_a_slice, made_outside)


def _mesh() -> Any:
    mesh = sf.make_mesh((2, 2), ("dp", "tp"))
    mesh["dp", "tp"]._flatten("dp_tp")
    return mesh


def _plain(out: Any) -> list[Any]:
    out = out if isinstance(out, tuple) else (out,)
    return [x.clone() if isinstance(x, torch.Tensor) else str(x) for x in out]


def _on_a_rank(indices: list[int]) -> Any:
    mesh, x = _mesh(), own(dist.get_rank())
    return {
        index: (_plain(PROGRAMS[index](x.clone(), mesh)), _plain(_staged(index, mesh)(x)))
        for index in indices
    }


def _staged(index: int, mesh: Any) -> Any:
    return sf.jit(lambda x: PROGRAMS[index](x, mesh), backend="aten")


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest) -> Any:
    """The answers of each of four real ranks, to the programs that are asked for."""
    return run_ranks(4, _on_a_rank, sorted(asked(request, "index")))


@pytest.mark.parametrize("index", range(len(PROGRAMS)))
def test_s7_3_a_flattened_mesh_answers_as_eager_torch(index: int, answers: Any) -> None:
    for rank in answers:
        eager, staged = rank[index]
        torch.testing.assert_close(_numbers(staged), _numbers(eager))
        assert _texts(staged) == _texts(eager)
    with sf.fake_world(4):
        mesh = _mesh()
        x = SimulatedTensor([own(rank) for rank in range(4)])
        out = _plain(_staged(index, mesh)(x))
    for rank, (eager, _) in enumerate(row[index] for row in answers):
        mine = [x.shards[rank] if hasattr(x, "shards") else x for x in out]
        torch.testing.assert_close(_numbers(mine), _numbers(eager))


def _numbers(out: list[Any]) -> list[torch.Tensor]:
    return [x for x in out if isinstance(x, torch.Tensor)]


def _texts(out: list[Any]) -> list[str]:
    return [x for x in out if isinstance(x, str)]


def test_a_mesh_of_a_flattened_axis_and_another() -> None:
    with sf.fake_world(8):
        mesh = sf.make_mesh((2, 2, 2), ("dp", "cp", "tp"))
        mesh["dp", "cp"]._flatten("rows")
        part = mesh["rows", "tp"]

        def loss(x: Any) -> Any:
            d = DTensor.from_local(x, part, [S, Shard(1)])
            return d.redistribute(part, [R, Shard(1)]).square().sum().full_tensor()

        x = torch.rand(2, 3, dtype=torch.float64)
        total, gradient = sf.jit(sf.value_and_grad(loss), backend="aten")(x)
        torch.testing.assert_close(total.shards, [8 * x.square().sum()] * 8)
        torch.testing.assert_close(gradient.shards, [2 * x] * 8)


def test_in_shard_map_and_shard() -> None:
    with sf.fake_world(4):
        mesh = _mesh()
        fn = lambda x: x + mesh["dp_tp"].get_local_rank()
        mapped = sf.shard_map(fn, mesh, sf.P(), sf.P(("dp", "tp")), backend="aten")
        assert sf.full(mapped(torch.zeros(1))).tolist() == [0, 1, 2, 3]
        flat = mesh["dp_tp"]
        placed = sf.shard(lambda x: distribute_tensor(x, flat, [S]) * 2, flat, backend="aten")(
            torch.arange(8.0)
        )
        assert placed.placements == (S,)
        torch.testing.assert_close(sf.full(placed), torch.arange(8.0) * 2)


@pytest.mark.parametrize("first", ["the mesh", "the flattened mesh"])
def test_dtensors_on_a_mesh_and_on_it_flattened_are_refused_together(first: str) -> None:
    with sf.fake_world(4):
        mesh = _mesh()
        flat = mesh["dp_tp"]

        def fn(x: Any) -> Any:
            rows = [(mesh, [S, S]), (flat, [S])]
            rows = rows if first == "the mesh" else rows[::-1]
            a, b = [DTensor.from_local(x, *row).full_tensor() for row in rows]
            return a + b

        with pytest.raises(sf.PlacementError) as caught:
            sf.jit(fn, backend="aten")(own(0))
        shown = str(caught.value)
        assert "the flattened mesh of the DTensor is (dp_tp=4), but the code uses the mesh" in shown
        assert "give a placement for each of dp, tp, on the mesh with these axes" in shown


def test_a_name_that_is_taken() -> None:
    with sf.fake_world(4):
        mesh = _mesh()
        fn = sf.jit(lambda x: x * mesh._flatten("dp").size(), backend="aten")
        with pytest.raises(sf.CaptureError, match="dp already exists") as caught:
            fn(own(0))
        assert caught.value.fix == "give the flattened mesh a name: mesh._flatten('name')"
