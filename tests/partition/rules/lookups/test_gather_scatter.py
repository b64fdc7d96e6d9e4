"""Lookups, and scatters along a dim: every choice of their rules is right on shards."""

from __future__ import annotations

import pieces
import pytest
import torch

import shardfn as sf
from shardfn import P
from tests.support.stages.rule_proofs import choices

aten = torch.ops.aten


TABLE, ROWS = (torch.arange(10.0, dtype=torch.float64).view(5, 2), torch.tensor([4, 3, 2, 1, 0]))
WIDE = ROWS[:, None].expand(5, 2)
LOOKUPS = {
    "embedding": (aten.embedding.default, (TABLE, ROWS), "sum"),
    "gather": (aten.gather.default, (TABLE, 0, WIDE), "sum"),
    "scatter": (aten.scatter.value, (TABLE, 0, WIDE[:3], -1.0), 0),
    "scatter_add": (aten.scatter_add.default, (TABLE, 0, WIDE, TABLE), 0),
}


@pytest.mark.parametrize("name", list(LOOKUPS))
def test_a_table_cut_over_two_axes_is_read_and_written_at_its_own_offset(name: str) -> None:
    """5 rows on 2 x 2 ranks: pieces of 2, 1, 1, 1 rows, so that equal sizes do not mean equal
    offsets.
    """
    target, args, made = LOOKUPS[name]
    op = pieces.OneOp(target, args, {})
    rest = [("R", "R")] * (len(op.tensors) - 1)
    op.prove([(0, 0), *rest], [(made, made)], (2, 2))


@pytest.mark.parametrize("padding", [-1, 0, 3])
def test_the_gradient_of_a_table_over_two_axes_is_made_where_its_rows_are(padding: int) -> None:
    """Also for a rank without rows, and where an index repeats."""
    index = torch.tensor([4, 0, 4, 3])
    for rows, sizes in ((5, (2, 2)), (5, (2, 3))):
        args = (TABLE[:4], index, rows, padding, False)
        op = pieces.OneOp(aten.embedding_dense_backward.default, args, {})
        op.prove([("R", "R")] * 2, [(0, 0)], sizes)


def test_no_rank_makes_the_gradient_of_rows_of_other_ranks() -> None:
    def loss(table: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(at, table).square().sum()

    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        step = sf.shard(sf.value_and_grad(loss), mesh, (P("tp"), P("dp")))
        graph = step.lower(TABLE.repeat(2, 1), ROWS.repeat(2)).program.graph
    (node,) = graph.find_nodes(op="call_function", target=aten.embedding_dense_backward.default)
    assert node.meta["val"].shape == (5, 2)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["embedding", "gather"])
def test_a_lookup_does_not_see_what_other_rows_of_the_table_hold(name: str, bad: float) -> None:
    target, (table, *args), _ = LOOKUPS[name]
    table = table.clone()
    table[0] = table[2] = bad
    pieces.OneOp(target, (table, *args), {}).prove([(0,), ("R",)], [("sum",)], (3,))


def test_a_rank_with_nothing_to_add_keeps_its_own_term() -> None:
    index, values = torch.tensor([0, 1]), TABLE[:2]
    add = pieces.OneOp(
        aten.scatter_add.default, (TABLE, 0, index[:, None].expand(2, 2), values), {}
    )
    put = pieces.OneOp(aten.index_put.default, (TABLE, [index], values, True), {})
    for op in (add, put):
        if (("sum", 0, 0), ("sum",)) in choices(op, (1,)):
            op.prove([("sum",), (0,), (0,)], [("sum",)], (3,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("include_self", [True, False])
def test_products_of_16_bits_of_rows_that_are_sharded_to_one_element(
    dtype: torch.dtype, include_self: bool
) -> None:
    """5 columns on 4 ranks: 2, 2, 1, and none. torch's kernel fails on one column."""
    x, index = torch.tensor([[1.5, 2, 3, 0, -1]] * 3).to(dtype), torch.tensor([0, 2, 2])
    f = lambda x, i, y: x.index_reduce(0, i, y, "prod", include_self=include_self)
    with sf.fake_world(4):
        mesh = sf.make_mesh((4,), ("dp",))
        columns = P(None, "dp")
        step = sf.shard(f, mesh, (columns, P(), columns), columns, backend="aten")
        assert torch.equal(sf.full(step(x, index, 2 * x)), f(x, index, 2 * x))
