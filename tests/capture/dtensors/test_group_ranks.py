"""The ranks of the groups of mesh axes, for each rank of a mesh."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import shardfn as sf
from shardfn.capture.dtensors import group_ranks
from shardfn.capture.shard_map import axis_names


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
                with pytest.raises(sf.CaptureError, match="the given ranks are tensors") as error:
                    group_ranks.name_of_ranks(tag, *some)
                assert error.value.fix == "group.group_name, of mesh.get_group(axis)"
