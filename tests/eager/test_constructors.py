"""torch's constructors of DTensors in a simulated world make tensors for all ranks."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, zeros

import shardfn as sf
from shardfn.simulated import SimulatedTensor, UnreadTensor

X = torch.arange(6.0).view(3, 2)


def test_a_local_tensor_is_that_of_each_rank() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("a",))
        x = DTensor.from_local(X, mesh, [Shard(0)])
        assert isinstance(x._local_tensor, SimulatedTensor)
        assert torch.equal(x.full_tensor(), torch.cat([X, X]))


def test_ranks_share_no_memory() -> None:
    with sf.fake_world(2):
        x = DTensor.from_local(X.clone(), sf.make_mesh((2,), ("a",)), [Replicate()])
        first, second = x._local_tensor.shards
        assert first.data_ptr() != second.data_ptr()


def test_a_global_tensor_is_sharded_and_a_factory_makes_every_shard() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("a",))
        x = distribute_tensor(X, mesh, [Shard(0)])
        assert [len(s) for s in x._local_tensor.shards] == [2, 1]
        assert torch.equal(x.full_tensor(), X)
        made = zeros(3, 2, device_mesh=mesh, placements=[Shard(0)])
        assert torch.equal(made.full_tensor(), torch.zeros(3, 2))


def test_outside_of_the_world_torch_is_as_before() -> None:
    before = DTensor.__new__
    with sf.fake_world(2):
        pass
    assert DTensor.__new__ is before


def test_a_dtensor_on_a_part_is_of_its_ranks_and_all_parts_are_alike() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("a", "b"))
        rows = [X + k for k in (0, 1, 0, 1)]
        for place in (
            lambda x: DTensor.from_local(x, mesh["b"], [Shard(0)]),
            lambda x: distribute_tensor(x, mesh["b"], [Shard(0)], src_data_rank=None),
        ):
            assert len(place(SimulatedTensor(rows)).to_local().shards) == 4
            with pytest.raises(sf.PlacementError, match="hold different values"):
                place(SimulatedTensor([X + k for k in range(4)]))
        part = DTensor.from_local(SimulatedTensor(rows), mesh["b"], [Shard(0)])
        assert torch.equal(part.full_tensor(), torch.cat(rows[:2]))
        whole = DTensor.from_local(part.to_local(), mesh, [Shard(0), Shard(0)])
        assert torch.equal(whole.full_tensor(), torch.cat(rows))


def test_the_tensor_of_the_first_rank_is_sent_whichever_rank_is_shown() -> None:
    rows = [X + k for k in range(4)]
    for rank in (0, 3):
        with sf.fake_world(4, rank=rank):
            mesh = sf.make_mesh((2, 2), ("a", "b"))
            for placements in ([Shard(0), Replicate()], [Replicate(), Shard(1)]):
                x = distribute_tensor(SimulatedTensor(rows), mesh, placements)
                assert torch.equal(x.full_tensor(), X)
                assert len({s.data_ptr() for s in x._local_tensor.shards}) == 4


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_s2_1_fully_shard_makes_the_shards_of_all_ranks(shape: tuple[int, ...]) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)).double()
    wanted = {name: x.detach().clone() for name, x in net.named_parameters()}
    batch = torch.arange(12.0, dtype=torch.float64).view(4, 3)
    call = lambda params, x: torch.func.functional_call(plain, params, (x,)).sum()
    plain = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)).double()
    with sf.fake_world(4 if len(shape) > 1 else 2):
        mesh = sf.make_mesh(shape, ("dp", "tp")[: len(shape)])
        fully_shard(net[0], mesh=mesh)
        fully_shard(net, mesh=mesh)
        params = {name: x.detach() for name, x in net.named_parameters()}
        assert params["0.weight"].placements[-1] == Shard(0)
        assert params["0.weight"].to_local(rank=1).shape == (2, 3)
        for name, x in params.items():
            torch.testing.assert_close(x.full_tensor(), wanted[name])
        out = sf.shard(sf.grad(call), mesh, backend="aten")(params, batch)
        gradients = torch.func.grad(call)(wanted, batch)
        for name, x in out.items():
            torch.testing.assert_close(sf.full(x), gradients[name])


MAKES = {
    "from_local": lambda mesh: DTensor.from_local(X, mesh, [Shard(0)]),
    "sharded": lambda mesh: distribute_tensor(X, mesh, [Shard(1)]),
    "replicated": lambda mesh: distribute_tensor(X, mesh, [Replicate()]),
    "zeros": lambda mesh: zeros((3, 2), device_mesh=mesh, placements=[Shard(0)]),
}


@pytest.mark.parametrize("make", MAKES)
def test_in_a_world_without_values_dtensors_have_none(make: str) -> None:
    with sf.fake_world(8, rank=1, numerics=False):
        mesh = sf.make_mesh((8,), ("a",))
        x = MAKES[make](mesh)
        assert isinstance(x.to_local(), UnreadTensor)
        y = (x.full_tensor() + 1).sum()
        with pytest.raises(sf.FakeValueError, match="the code reads a value"):
            y.item()
