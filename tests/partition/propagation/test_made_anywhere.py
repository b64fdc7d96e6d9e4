"""Random numbers and expanded scalars are made where they are read, and nothing is sent."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import shardfn as sf
from shardfn import P
from shardfn.random.continuous import uniform
from tests.support.stages.plans import planned, told

KEY = torch.tensor([7, 0])
X = torch.ones(4, 6)


def test_each_rank_draws_its_shard() -> None:
    fn = lambda key, x: [x + uniform(key, (4, 6))]
    plan = planned(fn, (KEY, X), [("R",), (1,)])
    assert told(plan) == ["apply random_bits: R -> 1", "apply add: 1, 1 -> 1"]


def test_two_readers_at_two_placements_draw_twice() -> None:
    def fn(key: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        drawn = uniform(key, (4, 6))
        return [x + drawn, y + drawn]

    plan = planned(fn, (KEY, X, torch.ones(4, 6)), [("R",), (1,), (0,)])
    drawn = [line for line in told(plan) if "random_bits" in line]
    assert sorted(drawn) == ["apply random_bits: R -> 0", "apply random_bits: R -> 1"]
    assert not any("redistribute" in line for line in told(plan))


def test_functions_of_random_numbers_alone_are_made_with_them() -> None:
    fn = lambda key, x: [x * (uniform(key, (4, 6)) * 2 - 1)]
    plan = planned(fn, (KEY, X), [("R",), (0,)])
    assert told(plan) == [
        "apply random_bits: R -> 0",
        "apply mul: 0 -> 0",
        "apply sub: 0 -> 0",
        "apply mul_1: 0, 0 -> 0",
    ]


def test_an_expanded_scalar_is_expanded_on_each_rank() -> None:
    fn = lambda s, x: [s.expand(4, 6) + x]
    plan = planned(fn, (torch.ones(()), X), [("R",), (1,)])
    assert told(plan) == ["apply expand: R -> 1", "apply add: 1, 1 -> 1"]


def test_a_result_that_nothing_shards_is_replicated() -> None:
    plan = planned(lambda key: [uniform(key, (4, 6))], (KEY,), [("R",)])
    assert plan.outs[0].placements == ("R",)


def test_random_numbers_of_blocks_of_a_dim_are_right() -> None:
    def attention(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Two heads, of which the key of each sample has a last column of their own."""
        keys = torch.cat([x, bias.expand(1, 2, 2)])  # (time, sample, heads)
        scores = keys.reshape(4, 4, 1).permute(1, 0, 2) * 2
        return F.dropout(scores, 0.5).sum((1, 2))

    x, bias = (torch.randn(*n, dtype=torch.float64) for n in ((3, 2, 2), (1, 1, 2)))
    sf.random.state.seed(3)
    wanted = sf.jit(attention, backend="aten")(x, bias)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        sf.random.state.seed(3)
        ins = (P(None, None, "tp"), P(None, None, "tp"))
        got = sf.shard(attention, mesh, ins, backend="aten")(x, bias)
        torch.testing.assert_close(sf.full(got), wanted)
