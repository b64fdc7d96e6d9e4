"""Where the values stand that Dynamo read outside of the arguments, by its own sources."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import shardfn as sf


def test_s7_4_answers_of_our_functions_are_results_beside_placements() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        outside = dist.distributed_c10d._rank_not_in_group
        fn = lambda x: (
            x * mesh.get_rank(),
            [outside(None), mesh.size(), dist.get_process_group_ranks(None)],
            Shard(0),
        )
        out = sf.jit(fn, backend="aten")(torch.ones(2))
        assert out[1:] == ([False, 2, [0, 1]], Shard(0))
