"""What a choice of placements counts: the memory of the rank that holds most."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardfn as sf
from shardfn.partition import propagate
from shardfn.runtime import trace
from shardfn.runtime.stages.choosing import chosen, peak_of
from tests.transforms.sharding.test_auto import SMALL, case, loss, sgd


def traced(mesh: Any, args: Any) -> Any:
    return trace(sf.shard(sgd(loss), mesh, sf.auto, backend="aten").request, args, {})


def test_the_peak_is_that_of_the_program_that_is_made() -> None:
    p, _, x = case()  # 11 rows on 3 ranks: 4, 4, 3
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("a",))
        places = sf.P(), sf.P("a")
        low = sf.shard(sgd(loss), mesh, places, backend="aten").lower(p, x)
        assert len({*map(id, low.programs.values())}) == 2
        assert peak_of(low.traced, low.partition).peak == low.memory.peak


def normed(p: Any, x: torch.Tensor) -> torch.Tensor:
    for up, down in p:
        x = x + F.gelu(F.layer_norm(x, x.shape[1:]) @ up) @ down
    return x.square().mean()


def test_cheap_values_that_a_compiled_step_recomputes_do_not_count() -> None:
    """The limit is one of `lowered.memory`."""
    pair = sf.ShapeDtype((128, 512)), sf.ShapeDtype((512, 128))
    args = [pair] * 3, sf.ShapeDtype((4096, 128))
    with sf.fake_world(2, numerics=False):
        mesh = sf.make_mesh((2,), ("a",))
        peaks = []
        for backend in ("aten", "inductor"):
            places = sf.P(), sf.P("a")
            low = sf.shard(sf.grad(normed), mesh, places, backend=backend).lower(*args)
            assert peak_of(low.traced, low.partition).peak == low.memory.peak
            peaks.append(low.memory.peak)
    assert peaks[1] < 0.9 * peaks[0]


@pytest.mark.parametrize("limit", [None, 36 * 2**20])
def test_a_choice_keeps_to_the_limit(limit: int | None) -> None:
    with sf.fake_world(8, numerics=False):
        mesh = sf.make_mesh((8,), ("x",))
        found = chosen(traced(mesh, SMALL), [True] * 3, limit)
    assert len(found.marks) == 3
    assert (found.peak is None) == (limit is None)
    assert found.peak is None or limit is None or found.peak <= limit


def test_a_call_that_autograd_follows_counts_both_halves() -> None:
    p, _, x = case()
    p = sf.tree_map(lambda w: w.requires_grad_(), p)
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("a",))
        low = sf.shard(loss, mesh, sf.auto, backend="aten").lower(p, x)
        halves = low.memory.peak, low.backward.memory.peak
        whole = propagate(low.traced.program, *low.traced.placements())
        assert peak_of(low.traced, whole).peak == max(halves)
