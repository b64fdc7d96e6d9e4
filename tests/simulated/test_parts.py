"""DTensors on a part of a mesh, by the local tensors of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardfn as sf
from shardfn.simulated import is_on_part, on_mesh, own_of_part, placements_on, uneven_dim

R, S = Replicate(), Shard(0)
W = torch.arange(8.0, dtype=torch.float64).reshape(4, 2).sin()


def grid() -> Any:
    return sf.make_mesh((2, 2), ("dp", "tp"))


def test_a_dtensor_is_on_a_part_of_its_own_mesh() -> None:
    with sf.fake_world(4):
        _on_a_part(grid())


def _on_a_part(mesh: Any) -> None:
    d = distribute_tensor(W, mesh["tp"], [S])
    assert is_on_part(d, mesh)
    assert not is_on_part(d, mesh["tp"])
    assert not is_on_part(distribute_tensor(W, mesh, [R, S]), mesh)
    assert not is_on_part(W, mesh)
    other = sf.make_mesh((4,), ("dp",))
    assert not is_on_part(d, other)


def test_every_rank_has_the_tensor_of_its_place_in_the_part() -> None:
    for rank in (0, 3):
        with sf.fake_world(4, rank=rank):
            mesh = grid()
            for axis, rows in (("tp", (0, 1, 0, 1)), ("dp", (0, 0, 1, 1))):
                d = distribute_tensor(W, mesh[axis], [S])
                every = own_of_part(d, mesh).shards
                halves = W.chunk(2)
                for x, k in zip(every, rows, strict=True):
                    assert torch.equal(x, halves[k])


def test_on_the_mesh_it_is_replicated_over_the_other_axes() -> None:
    with sf.fake_world(4):
        mesh = grid()
        d = distribute_tensor(W[:3], mesh["tp"], [S])  # uneven
        assert placements_on(d, mesh) == (R, S)
        whole = on_mesh(d, mesh)
        assert whole.device_mesh == mesh
        assert torch.equal(whole.full_tensor(), W[:3])
        assert on_mesh(whole, mesh) is whole
        assert on_mesh(W, mesh) is W


def test_a_dim_in_shards_of_different_sizes() -> None:
    with sf.fake_world(4):
        mesh = grid()
        assert uneven_dim(distribute_tensor(W, mesh, [S, Shard(1)])) is None
        assert uneven_dim(distribute_tensor(W[:3], mesh, [R, S])) == 0
        assert uneven_dim(distribute_tensor(W, mesh, [R, R])) is None
