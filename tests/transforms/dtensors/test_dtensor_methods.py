"""The calls of DTensor in the code of one rank, as the prims that they are made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing import assert_close
from worlds import SimulatedTensor

import shardfn as sf
from shardfn.capture.dtensors import replaced_calls
from shardfn.transforms.dtensors import _dtensor_methods as calls

X = torch.ones(6, 4)
S, R = Shard(0), Replicate()


def test_torchs_own_calls_are_in_the_table() -> None:
    assert replaced_calls.METHODS["to_local"] is calls.to_local
    assert replaced_calls.METHODS["redistribute"] is calls.redistribute
    assert replaced_calls.FUNCTIONS[DTensor.from_local] is calls.from_local


@pytest.mark.parametrize("placed", [R, S])
def test_what_all_ranks_compute_alike_has_one_gradient(placed: Any) -> None:
    """Where eager torch adds up n equal terms, on n ranks."""
    w = X.to(torch.float64)

    def loss(d: Any) -> torch.Tensor:
        return (d.full_tensor(grad_placements=[Partial()]) ** 2).sum()

    with sf.fake_world(2):
        d = distribute_tensor(w, sf.make_mesh((2,), ("dp",)), [placed])
        found = sf.jit(sf.grad(loss))(d)
        assert_close(found.full_tensor(), 2 * w)


def test_distribute_tensor_takes_the_tensor_of_a_rank() -> None:
    own = [X, X + 100]

    def place(x: torch.Tensor, rank: int) -> torch.Tensor:
        return distribute_tensor(x, mesh, [S], src_data_rank=rank).full_tensor()

    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        for rank in range(2):
            found = sf.jit(lambda x, rank=rank: place(x, rank))(SimulatedTensor(own))
            assert torch.equal(found.shards[0], own[rank])
        with pytest.raises(sf.CaptureError, match="src_data_rank is 2, but axis dp has 2"):
            sf.jit(lambda x: place(x, 2))(X)
