"""Levels of torch.func in a graph, replayed at another depth than they were written for."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Replicate, Shard

import shardfn as sf
from shardfn import _compat
from shardfn.capture.levels import ENTERS, LEAVES, NAMES, Nesting, dtensor_at


def test_a_written_level_is_the_current_one_of_its_place() -> None:
    nesting = Nesting(base=1)
    real = iter((7, 9))
    enter = lambda *_: next(real)
    assert nesting.call(enter, "_grad_increment_nesting", (), {}) == 7
    assert nesting.call(enter, "_vmap_increment_nesting", (), {}) == 9
    assert nesting.depth == 3
    wrap = lambda x, level: (x, level)
    assert nesting.call(wrap, "_wrap_for_grad", ("x", 2), {}) == ("x", 7)
    batch = lambda x, dim, level: (x, dim, level)
    assert nesting.call(batch, "_add_batch_dim", ("x", 0, 3), {}) == ("x", 0, 9)


def test_levels_end_in_the_order_in_which_they_began() -> None:
    nesting = Nesting(base=0)
    for level, name in enumerate(("_grad_increment_nesting", "_vmap_increment_nesting"), 1):
        nesting.call(lambda *_, n=level: n, name, (), {})
    nesting.call(lambda: None, "_vmap_decrement_nesting", (), {})
    assert nesting.levels == [1]
    nesting.call(lambda: None, "_grad_decrement_nesting", (), {})
    assert nesting.depth == 0


def test_there_is_one_level_of_dual_numbers() -> None:
    nesting = Nesting(base=0)
    assert nesting.call(None, "_enter_dual_level", (), {}) == 0
    assert nesting.call(None, "_exit_dual_level", (0,), {}) is None


def test_every_way_in_has_a_way_out() -> None:
    assert {n.replace("increment", "decrement") for n in ENTERS} == set(LEAVES) < NAMES


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
