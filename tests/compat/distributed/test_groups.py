"""Process groups by name, and DTensors made without torch's checks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard

import shardfn as sf
from shardfn._compat.distributed.groups import (
    dtensor_spec,
    dtensors,
    empty_dtensor,
    gone_spec,
    group_tag,
    is_arriving,
    is_unreduced,
    name_of_group,
    named_group,
    register_group,
    root_mesh,
    unreduced_spec,
)


def test_a_name_is_bound_again_to_another_group() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("a", "b"))
        for axis in (0, 1, 1):
            group = mesh.get_group(axis)
            register_group("shardfn_test", group)
            assert named_group("shardfn_test") == group
        assert root_mesh(mesh["a"]) == mesh


def test_specs_of_unreduced_and_of_donated_tensors_equal_no_other() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("a",))
        spec = dtensor_spec(mesh, (Partial(),), (4,), (1,), torch.float32)
        unreduced, gone = unreduced_spec(spec), gone_spec(spec)
        assert is_unreduced(unreduced) and not is_unreduced(spec)
        assert unreduced == unreduced_spec(spec) != spec and spec != unreduced
        assert gone != spec and gone != gone_spec(spec) and hash(unreduced) == hash(spec)


def test_dtensors_have_the_global_shape_of_their_spec() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("a",))
        spec = dtensor_spec(mesh, (Shard(0),), (5, 3), (3, 1), torch.float32)
        (x,) = dtensors([torch.ones(3, 3)], [spec])
        assert x.shape == (5, 3) and x._local_tensor.shape == (3, 3)
        empty = empty_dtensor(mesh, [Replicate()], (5, 3), (3, 1), torch.float64)
        assert empty.is_meta and empty.dtype == torch.float64 and empty.shape == (5, 3)


def test_a_result_that_has_not_arrived_is_known() -> None:
    assert not is_arriving(torch.ones(1)) and not dist.is_initialized()


def test_a_group_has_a_tag_and_a_name_by_its_ranks() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        for axis, ranks in (("dp", [2, 0]), ("tp", [0, 1])):
            group = mesh.get_group(axis)
            tag = group_tag(group)
            assert name_of_group(ranks, tag) == group.group_name
            assert name_of_group([0, 3], tag) is None
            assert name_of_group(ranks, "other") is None
