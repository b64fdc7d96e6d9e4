"""clip_by_global_norm equals torch's, alone, captured and sharded."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from shardfn import P
from tests.transforms.optimizers import table

GRADS = table.tree(0)


@pytest.mark.parametrize("max_norm", [1.0, 100.0])
def test_clipping_equals_clip_grad_norm_(max_norm: float) -> None:
    own = [torch.zeros_like(x) for x in table.flat(GRADS)]
    for p, g in zip(own, table.flat(GRADS), strict=True):
        p.grad = g.clone()
    wanted = torch.nn.utils.clip_grad_norm_(own, max_norm)
    limit = torch.tensor(max_norm, dtype=torch.float64)
    captured = sf.jit(sf.clip_by_global_norm, backend="aten")
    for grads, norm in (
        sf.clip_by_global_norm(GRADS, max_norm),
        captured(GRADS, limit),
    ):
        assert table.largest(grads, [p.grad for p in own]) < 1e-12
        assert abs(float(norm - wanted)) < 1e-12


def test_the_norm_of_nothing_is_zero() -> None:
    grads, norm = sf.clip_by_global_norm({"w": None}, 1.0)
    assert grads == {"w": None} and float(norm) == 0.0


def test_the_norm_of_shards_is_that_of_all() -> None:
    wanted, norm = sf.clip_by_global_norm(GRADS, 1.0)
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("a",))
        placed = {"in": P("a"), "out": [P(None, "a"), P()]}
        fn = sf.shard(
            lambda g: sf.clip_by_global_norm(g, 1.0),
            mesh,
            (placed,),
            backend="aten",
        )
        grads, of_all = sf.full(fn(GRADS))
        assert table.largest(grads, wanted) < 1e-12
        assert abs(float(of_all - norm)) < 1e-12
