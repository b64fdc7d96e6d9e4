"""What Inductor makes of an op."""

from __future__ import annotations

import torch

from shardfn.compile.kernels import op_kinds
from shardfn.compile.kernels.stored import LENGTH
from tests.support.stages.graphs import graph_of

X = torch.ones(4, 4)


def test_ops_are_formulas_views_or_kernels() -> None:
    graph = graph_of(lambda x: [torch.exp(x), x.t(), x @ x, x.sum(0), x.float()], X)
    kinds = {
        op_kinds.name(x): (op_kinds.is_formula(x), op_kinds.is_alias(x))
        for x in graph.nodes
        if x.op == "call_function"
    }
    assert kinds["exp"] == (True, False)
    assert kinds["t"] == (False, True)
    assert kinds["mm"] == kinds["sum"] == (False, False)


def test_a_sum_over_one_row_is_a_formula() -> None:
    graph = graph_of(lambda x: [x.sum(0)], torch.ones(1, 4))
    (node,) = (x for x in graph.nodes if x.op == "call_function")
    assert op_kinds.is_formula(node)


def test_one_kernel_adds_a_product_to_what_alone_reads_it() -> None:
    graph = graph_of(lambda x, y: [x @ x + y], X, X)
    product, total = (x for x in graph.nodes if x.op == "call_function")
    assert op_kinds.product_of(total) is product
    assert op_kinds.sum_of(product) is total
    graph = graph_of(lambda x, y: [(z := x @ x) + y, z], X, X)
    product, total = (x for x in graph.nodes if x.op == "call_function")
    assert op_kinds.product_of(total) is None


def test_exponentials_are_heavy() -> None:
    graph = graph_of(lambda x: [torch.exp(x), torch.relu(x)], X)
    exp, relu = (x for x in graph.nodes if x.op == "call_function")
    assert op_kinds.is_heavy(exp) and not op_kinds.is_heavy(relu)


def test_the_gradient_of_a_pool_is_as_long_as_its_window_is_large() -> None:
    image = torch.ones(1, 1, 12, 12)

    def length(size: int) -> int:
        pool = lambda x: torch.nn.functional.avg_pool2d(x, size, 1).sum()
        graph = graph_of(lambda x: [torch.func.grad(pool)(x)], image)
        (node,) = (x for x in graph.nodes if op_kinds.name(x) == "avg_pool2d_backward")
        return op_kinds.length(node)

    assert length(2) < LENGTH < length(3)
