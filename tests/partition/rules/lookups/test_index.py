"""Indexing by tensors of numbers: every choice of its rule is right on shards, and a table that is
sharded on its indexed dim is not gathered.
"""

from __future__ import annotations

from collections.abc import Callable

import pieces
import pytest
import torch
from equality import equal

import shardfn as sf
from shardfn import P

aten = torch.ops.aten


def f(*shape: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=g, dtype=torch.float64)


TABLE, ROWS = f(11, 3), torch.tensor([[4, -1, 0], [10, 4, 7]])


def indexed(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return table[rows]


def pairs(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return table[rows, rows % 3]


def selected(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.index_select(table, 0, rows.flatten() % 11)


def loss(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda table, rows: fn(table, rows).sin().square().sum()


@pytest.mark.parametrize("fn", [indexed, pairs, selected])
def test_a_table_sharded_on_rows_is_read_and_updated_where_it_is(
    fn: Callable[..., torch.Tensor],
) -> None:
    """11 rows on 4 ranks: shards of 3, 3, 3 and 2."""
    wide = torch.cat([TABLE] * 40, 1)
    gradient = sf.grad(loss(fn))
    with sf.fake_world(4):
        step = sf.shard(gradient, sf.make_mesh((4,), ("tp",)), (P("tp"), P()), backend="aten")
        equal(sf.full(step(wide, ROWS)), gradient(wide, ROWS))
        (sent,) = step.lower(wide, ROWS).collectives
        assert sent.kind == "all_reduce"
        assert sent.nbytes == fn(wide, ROWS).nbytes


def test_rows_over_two_axes_or_with_sharded_tokens_equal_one_device() -> None:
    gradient = sf.value_and_grad(loss(indexed))
    wanted = gradient(TABLE, ROWS)
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        for table, rows in (
            (P(("dp", "tp")), P()),
            (P(("dp", "tp")), P("dp")),
            (P("tp", "dp"), P(None, "dp")),
            (P("tp"), P("dp")),
        ):
            step = sf.shard(gradient, mesh, (table, rows), backend="aten")
            equal(sf.full(step(TABLE, ROWS)), wanted)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_lookup_does_not_see_what_other_rows_hold(bad: float) -> None:
    table = TABLE.clone()
    table[0] = table[2] = bad
    op = pieces.OneOp(aten.index.Tensor, (table, [ROWS % 2 + 3]), {})
    op.prove([(0,), ("R",)], [("sum",)], (3,))
