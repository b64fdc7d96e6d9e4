"""Levels of torch.func in a graph, replayed at another depth than they were written for."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Replicate, Shard

import shardfn as sf
from shardfn import _compat
from shardfn.capture.transform_levels import dtensor_at


def test_a_dtensor_of_one_sample_and_of_all() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("a", "b"))
        placed = (Replicate(), Shard(1))
        with _compat.neutral():
            x = _compat.empty_dtensor(mesh, placed, (4, 6), (6, 1), torch.float32)
            row = dtensor_at("_add_batch_dim", x, [0, 1])
            assert (tuple(row.shape), row.placements) == ((6,), (placed[0], Shard(0)))
            rows = dtensor_at("_remove_batch_dim", row, [1, 4, -1])
            assert (tuple(rows.shape), rows.placements[1]) == ((6, 4), Shard(0))
            assert dtensor_at("_add_batch_dim", x, [-1, 1]) is None
        assert dtensor_at("_wrap_for_grad", x, [1]) is x
        assert dtensor_at("_remove_batch_dim", None, [1, 4, 0]) is None
        assert dtensor_at("_make_dual", x, []) is None
