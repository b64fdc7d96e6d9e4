"""Branches and loops of torch's own inside a sharded function: right for cut operands, made
whole with a price.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import close
from torch._higher_order_ops import scan, while_loop
from torch.nn.attention.flex_attention import flex_attention
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P

X = torch.randn(7, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def branch(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin() * 2, lambda x: x.cos(), (x,)) + 1


def nested(x: torch.Tensor) -> torch.Tensor:
    inner = lambda x: torch.cond(x.max() > 100, lambda x: x * 3, lambda x: x - 1, (x,))
    return torch.cond(x.mean() > -100, inner, lambda x: x.cos(), (x,))


def summed(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x[0, 0] > 0, lambda x: x - x.sum(0), lambda x: x.cos().cumsum(0), (x,))


def folded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return scan(lambda c, row: (c * 0.5 + row, c * row), torch.zeros(4, dtype=torch.float64), x)


def repeated(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 1.5 + 1), (torch.tensor(0), x))


def attended(x: torch.Tensor) -> torch.Tensor:
    q = torch.stack([x, x + 1]).view(1, 2, 7, 4)
    return flex_attention(q, q * 2, q - 1, score_mod=lambda score, b, h, i, j: score + (i - j))


pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.mark.parametrize("fn", [branch, nested, summed, folded, repeated, attended])
@pytest.mark.parametrize(
    ("sizes", "placement"), [((2,), P("a")), ((3,), P(None, "a")), ((2, 2), P("a", "b"))]
)
def test_a_higher_order_op_equals_the_plain_one_on_cut_operands(
    fn: Callable[..., Any], sizes: tuple[int, ...], placement: Any
) -> None:
    for x in (X, -X):
        with sf.fake_world(sizes[0] * (sizes[1:] or (1,))[0]):
            mesh = sf.make_mesh(sizes, ("a", "b")[: len(sizes)])
            got = sf.full(sf.shard(fn, mesh, placement, backend="aten")(x))
        close(got, fn(x))


@pytest.mark.parametrize("fn", [branch, folded, repeated])
def test_inductor_compiles_a_higher_order_op_as_torch_writes_it(fn: Callable[..., Any]) -> None:
    with simulated(a=2) as mesh:
        train = sf.shard(fn, mesh, P("a"))
        assert "cond" in str(train.lower(X)) or fn is not branch
        assert_close(sf.full(train(X)), fn(X))


def test_a_pointwise_branch_stays_cut() -> None:
    with simulated(a=2) as mesh:
        lowered = sf.shard(branch, mesh, P("a"), backend="aten").lower(X)
        assert [c.kind for c in lowered.collectives] == ["all_reduce"], "of the sum that decides"


def test_what_is_made_whole_for_a_branch_is_an_implicit_gather_that_can_be_refused() -> None:
    with simulated(a=2) as mesh:
        kinds = [
            c.kind for c in sf.shard(folded, mesh, P("a"), backend="aten").lower(X).collectives
        ]
        assert kinds == ["all_gather"]
        with pytest.raises(sf.PlacementError, match="scan"):
            sf.shard(folded, mesh, P("a"), implicit_comm="error").lower(X)


def test_a_branch_draws_on_a_mesh_what_it_draws_on_one_device() -> None:
    drawn = lambda x: torch.cond(
        x.sum() > -100, lambda x: x + torch.rand_like(x), lambda x: x.cos(), (x,)
    )
    sf.random.state.seed(3)
    expected = sf.jit(drawn)(X)
    assert ((expected > X) & (expected < X + 1)).all()
    with simulated(a=2) as mesh:
        placed = sf.shard(drawn, mesh, P("a"))
        sf.random.state.seed(3)
        assert torch.equal(placed(X).full_tensor(), expected)


def test_a_graph_of_an_op_that_cannot_draw_is_refused() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        q = x.view(1, 1, 7, 4)
        score = lambda score, b, h, i, j: score + torch.rand_like(score)
        return flex_attention(q, q, q, score_mod=score)

    with pytest.raises(sf.RuleError, match="but its subgraphs have no random state"):
        sf.jit(noisy)(X)
    with (
        sf.fake_world(2),
        pytest.raises(sf.RuleError, match="try: use sf.cond, sf.scan or sf.while_loop"),
    ):
        sf.shard(noisy, sf.make_mesh((2,), ("a",)), P())(X)
