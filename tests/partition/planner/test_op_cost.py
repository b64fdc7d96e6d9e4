"""The arithmetic and the memory traffic of one op, against counts by hand."""

from __future__ import annotations

import functools
import operator

import attrs
import pytest
import torch

import shardfn as sf
from shardfn.hardware import H100, SENT
from shardfn.partition.planner import op_cost
from tests.support.stages.graphs import calls, graph_of

X, W = torch.ones(5, 3), torch.ones(3, 7)


def test_a_product_multiplies_and_adds_for_every_term() -> None:
    (mm,) = calls(graph_of(torch.mm, X, W), "mm")
    assert op_cost.flops(mm) == 2 * 5 * 3 * 7
    assert op_cost.traffic(mm) == 4 * (5 * 3 + 3 * 7 + 5 * 7)


def test_other_ops_count_their_traffic_alone() -> None:
    (add,) = calls(graph_of(torch.add, X, torch.ones(3)), "add")
    assert (op_cost.flops(add), op_cost.traffic(add)) == (0.0, 4 * (15 + 3 + 15))
    assert op_cost.seconds(add, H100) > 0
    assert op_cost.in_bytes(add) == pytest.approx(op_cost.seconds(add, H100) * SENT)


def test_a_view_costs_nothing() -> None:
    graph = graph_of(lambda x: x.t() + 1, X)
    view, add = (n for n in graph.nodes if n.op == "call_function")
    assert op_cost.is_alias(view) and not op_cost.is_alias(add)
    assert op_cost.seconds(view, H100) == 0.0


def test_an_item_of_several_results_costs_nothing() -> None:
    graph = graph_of(lambda x: torch.max(x, 0)[1], X)
    items = [n for n in graph.nodes if n.target is operator.getitem]
    assert items and all(op_cost.is_alias(n) for n in items)


def test_bytes_of_tensors_and_of_tuples_of_them() -> None:
    assert op_cost.nbytes((X, None, W.half())) == 4 * 15 + 2 * 21
    assert op_cost.nbytes(None) == 0


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    return op(q, k, v)[0]


def grouped(x: torch.Tensor, w: torch.Tensor, *ends: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._grouped_mm.default(x, w, *ends)


HALF = torch.bfloat16
ENDS = torch.tensor([16, 16, 32], dtype=torch.int32)
ROWS, SHARED = torch.ones(32, 16, dtype=HALF), torch.ones(32, 48, dtype=HALF)
EACH, STACKED = torch.ones(3, 16, 48, dtype=HALF), torch.ones(3, 8, 16, dtype=HALF)
HEADS, KEYS = torch.ones(2, 4, 5, 8), torch.ones(2, 4, 7, 8)
PRODUCTS = {
    "rows of groups": (grouped, (ROWS, EACH, ENDS), 32 * 16 * 48),
    "columns of groups": (grouped, (STACKED, ROWS.t(), ENDS), 8 * 16 * 32),
    "terms of groups": (grouped, (ROWS.t(), SHARED, ENDS), 16 * 32 * 48),
    "one of each group": (grouped, (STACKED, EACH), 3 * 8 * 16 * 48),
    "a vector": (torch.mv, (X, torch.ones(3)), 15),
    "two vectors": (torch.dot, (torch.ones(9), torch.ones(9)), 9),
    "attention": (attention, (HEADS, KEYS, KEYS), 2 * (2 * 4 * 5 * 7 * 8)),
}


@pytest.mark.parametrize("case", PRODUCTS)
def test_products_that_torchs_counter_does_not_know(case: str) -> None:
    fn, args, terms = PRODUCTS[case]
    graph = graph_of(fn, *args)
    assert sum(map(op_cost.flops, graph.nodes)) == 2 * terms


def gradients(*args: torch.Tensor, causal: bool = False) -> tuple[torch.Tensor, ...]:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    inputs = [x.detach().requires_grad_() for x in args]
    return torch.autograd.grad(op(*inputs, 0.0, causal)[0].sum(), inputs)


def test_the_gradient_of_attention_counts_five_products() -> None:
    backward = calls(
        graph_of(gradients, HEADS, KEYS, KEYS),
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    )
    assert [*map(op_cost.flops, backward)] == [5 * 2 * (2 * 4 * 5 * 7 * 8)]
    assert [*map(op_cost.model_flops, backward)] == [4 * 2 * (2 * 4 * 5 * 7 * 8)]


def test_a_causal_attention_runs_half_of_its_pairs_and_a_model_counts_all() -> None:
    causal = functools.partial(gradients, causal=True)
    nodes = [*graph_of(causal, KEYS, KEYS, KEYS).nodes]
    one = 2 * (2 * 4 * 7 * 7 * 8)  # a product of all pairs
    assert sum(map(op_cost.flops, nodes)) == (2 + 5) * one / 2
    assert sum(map(op_cost.model_flops, nodes)) == (2 + 4) * one


def test_a_recomputed_product_runs_and_a_model_does_not_need_it() -> None:
    @sf.checkpoint
    def layer(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return ((x @ w).sin() @ w).cos()

    one = 2 * 5 * 3 * 3
    step = sf.jit(sf.value_and_grad(lambda w, x: layer(w, x).sum()), backend="aten")
    graph = step.lower(torch.ones(3, 3), torch.ones(5, 3)).program.graph
    assert sum(map(op_cost.model_flops, graph.nodes)) == (2 + 3) * one
    assert sum(map(op_cost.flops, graph.nodes)) == (2 + 3 + 2) * one


@pytest.mark.parametrize("name", op_cost.ATTENTION)
def test_the_place_of_is_causal_is_that_of_torch(name: str) -> None:
    op = getattr(torch.ops.aten, name.removeprefix("aten::")).default
    names = [x.name for x in op._schema.arguments]
    assert names.index("is_causal") == op_cost.ATTENTION[name]
    first = int(name.endswith("_backward"))
    assert names[first : first + 3] == ["query", "key", "value"]


def test_a_product_as_float8_casts_its_operands_and_runs_at_that_rate() -> None:
    x, w = torch.ones(5, 3, dtype=HALF), torch.ones(3, 7, dtype=HALF)
    (mm,) = calls(graph_of(torch.mm, x, w), "mm")
    card = sf.Hardware("a card", 1.0, 1.0, memory=10.0, link=1.0, latency=0.0, flops8=2.0)
    assert op_cost.seconds(mm, card) == 2 * 5 * 3 * 7
    operands = 5 * 3 + 3 * 7
    cast = operands * (2 + 2 + 1) / 10
    as_float8 = attrs.evolve(card, float8=True)
    assert op_cost.seconds(mm, as_float8) == 2 * 5 * 3 * 7 / 2 + cast
    both = graph_of(lambda x, w: [x @ w, x.view(5, 3) @ (w + 1)], x, w)
    shared = operands - 5 * 3 / 2
    for product in calls(both, "mm"):
        cast = shared * (2 + 2 + 1) / 10
        assert op_cost.seconds(product, as_float8) == pytest.approx(2 * 5 * 3 * 7 / 2 + cast)
    (wide,) = calls(graph_of(torch.mm, x.float(), w.float()), "mm")
    assert op_cost.seconds(wide, as_float8) == op_cost.seconds(wide, card)
