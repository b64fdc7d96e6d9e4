"""The stages of one call as objects: each prints, and each can be taken further."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf

S = sf.ShapeDtype


def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x @ w).square().sum()


def test_a_trace_is_global_and_a_lowering_is_of_one_rank() -> None:
    with sf.fake_world(2, numerics=False):
        mesh = sf.make_mesh((2,), ("a",))
        fn = sf.shard(sf.grad(loss), mesh, (sf.P(), sf.P("a")), backend="aten")
        traced = fn.trace(S((3, 4)), S((6, 3)))
        assert "f32[6, 3]" in str(traced) and "all_reduce" not in str(traced)
        axes, ins, outs, unreduced = traced.placements()
        assert (axes.sizes, ins, unreduced) == ((2,), (("R",), (0,)), ())
        assert outs == [None]
        lowered = traced.lower()
        assert "all_reduce" in str(lowered) and "f32[6@a, 3]" in str(lowered)


def test_the_whole_text_is_longer_than_the_short_one() -> None:
    params = [S((2, 2)) for _ in range(30)]
    fn = lambda ps, x: [x @ p for p in ps]
    traced = sf.jit(fn, backend="aten").trace(params, S((2, 2)))
    assert len(traced.text()) > len(str(traced)) and repr(traced) == str(traced)


def test_random_calls_need_a_key_where_that_is_required() -> None:
    fn = sf.jit(lambda x: x + torch.rand(3), backend="aten", seed="required")
    with pytest.raises(sf.ShardError, match="torch draws random numbers"):
        fn.trace(S((3,)))
