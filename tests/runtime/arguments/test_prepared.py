"""Arguments as programs take them: plain ones as they are, and what cannot be taken."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardfn as sf
from shardfn.runtime.arguments.prepared import is_prepared, prepared
from tests.compat.dynamo.test_shells import Scaled

X = torch.ones(2, 3)
HELD = Scaled(X, X, None)


def test_plain_tensors_and_dtensors_are_taken_as_they_are() -> None:
    with sf.fake_world(2):
        x = sf.distribute(X, sf.make_mesh((2,), ("a",)), sf.P("a"))
        assert is_prepared([X, x, 3, None])
        args, kwargs = prepared("f", (x, [X]), {"k": 3})
        assert args[0] is x and args[1][0] is X and kwargs == {"k": 3}


def test_a_tensor_that_holds_others_is_itself_and_not_prepared() -> None:
    assert not is_prepared([X, HELD])
    args, _ = prepared("f", (HELD,), {})
    assert args[0] is HELD


def test_local_tensors_of_all_ranks_are_no_argument() -> None:
    with sf.fake_world(2):
        x = sf.distribute(X, sf.make_mesh((2,), ("a",)), sf.P("a"))
        local = x._local_tensor
        local.shards[:] = [Scaled(X, X, None) for _ in local.shards]
        with pytest.raises(sf.TreeError, match="the local tensors of all ranks, each a Scaled"):
            prepared("f", (local,), {})


def test_a_dtensor_on_a_part_of_the_mesh_becomes_one_on_it() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("a", "b"))
        x = distribute_tensor(X, mesh["b"], [Shard(1)])  # 3 columns: 2 and 1
        assert is_prepared([x]) and not is_prepared([x], mesh)
        ((made,), _) = prepared("f", (x,), {}, mesh)
        assert made.device_mesh == mesh
        assert made.placements == (Replicate(), Shard(1))
        assert [tuple(y.shape) for y in made.to_local().shards] == [(2, 2), (2, 1)] * 2
        assert is_prepared([made], mesh)
