"""torch's constructors of DTensors in a simulated world make tensors for all ranks."""

from __future__ import annotations

import torch
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    zeros,
)

import shardfn as sf
from shardfn.simulated import SimulatedTensor

X = torch.arange(6.0).view(3, 2)


def test_a_local_tensor_is_that_of_each_rank() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("a",))
        x = DTensor.from_local(X, mesh, [Shard(0)])
        assert isinstance(x._local_tensor, SimulatedTensor)
        assert torch.equal(x.full_tensor(), torch.cat([X, X]))


def test_ranks_share_no_memory() -> None:
    with sf.fake_world(2):
        x = DTensor.from_local(
            X.clone(), sf.make_mesh((2,), ("a",)), [Replicate()]
        )
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
