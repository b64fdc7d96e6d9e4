"""The ranks of the groups of mesh axes, for each rank of a mesh."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from shardfn.capture.dtensors import group_ranks
from shardfn.capture.shard_map import axis_names


def test_numbers_and_members_by_rank() -> None:
    with sf.fake_world(4):
        mesh = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("dp", "tp"))
        with axis_names.scope(mesh, "cpu"):
            assert group_ranks.ranks_here() == (3, 1, 0, 2)
            assert group_ranks.numbers(("tp",)) == (1, 0, 0, 1)
            assert group_ranks.numbers(("dp",)) == (1, 0, 0, 1)
            assert group_ranks.numbers(("dp", "tp")) == (3, 1, 0, 2)
            assert group_ranks.columns(("tp",)) == ((1, 1, 0, 0), (3, 3, 2, 2))
            assert not group_ranks.in_order(("tp",))
        plain = sf.make_mesh((2, 2), ("dp", "tp"))
        with axis_names.scope(plain, "cpu"):
            for axes in (("dp",), ("tp",), ("dp", "tp")):
                assert group_ranks.in_order(axes)
            assert group_ranks.columns(("dp",)) == ((0, 1, 0, 1), (2, 3, 2, 3))


def test_the_group_of_all_ranks() -> None:
    with sf.fake_world(3):
        some = dist.new_group([0, 2])
        assert group_ranks.of_all(None) == (0, 1, 2)
        assert group_ranks.of_all(dist.group.WORLD) == (0, 1, 2)
        assert group_ranks.of_all(some) is None
        assert group_ranks.group_rank("f", None, 2) == 2


def test_s7_4_the_name_of_the_group_that_has_some_ranks() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        groups = mesh.get_group("dp"), mesh.get_group("tp")
        tags = [dist.distributed_c10d._get_group_tag(group) for group in groups]
        ranks = [[torch.zeros(()) for _ in range(2)] for _ in groups]
        with axis_names.scope(mesh, "cpu"):
            for group, own in zip(groups, ranks, strict=True):
                group_ranks.note_ranks(group, *own)
            for group, own, tag in zip(groups, ranks, tags, strict=True):
                assert group_ranks.name_of_ranks(tag, *own) == group.group_name
            assert group_ranks.name_of_ranks(tags[1], 0, 1) == groups[1].group_name
            backwards = ranks[0][::-1]
            assert group_ranks.name_of_ranks(tags[0], *backwards) == groups[0].group_name
            with pytest.raises(sf.CaptureError, match=r"no group .* the ranks \[0, 3\]"):
                group_ranks.name_of_ranks(tags[0], 0, 3)
            for some, tag in ((ranks[0], "other"), (ranks[0][:1], tags[0])):
                with pytest.raises(sf.CaptureError, match="its ranks are tensors") as error:
                    group_ranks.name_of_ranks(tag, *some)
                assert error.value.fix == "group.group_name, of mesh.get_group(axis)"


def test_nobody_is_in_one_group() -> None:
    assert group_ranks.is_nobody(dist.GroupMember.NON_GROUP_MEMBER)
    with sf.fake_world(2):
        assert not group_ranks.is_nobody(None)
        assert not group_ranks.is_nobody(dist.group.WORLD)


def test_numbers_are_read_on_the_axes_over_which_they_differ() -> None:
    with sf.fake_world(6):
        mesh = sf.make_mesh((2, 3), ("dp", "tp"))
        with axis_names.scope(mesh, "cpu"):
            assert group_ranks.by_axes((0, 0, 0, 3, 3, 3)) == (("dp",), (0, 3))
            assert group_ranks.by_axes((0, 1, 2, 0, 1, 2)) == (("tp",), (0, 1, 2))
            everywhere = (0, 1, 2, 3, 4, 5)
            assert group_ranks.by_axes(everywhere) == (("dp", "tp"), everywhere)
            assert group_ranks.by_axes((7,) * 6) == (("tp",), (7, 7, 7))
