"""The arithmetic and the memory traffic of one op, against counts by hand."""

from __future__ import annotations

import operator

import pytest
import torch

from shardfn.hardware import H100
from shardfn.partition.planner import work
from tests.support.stages.graphs import calls, graph_of

X, W = torch.ones(5, 3), torch.ones(3, 7)


def test_a_product_multiplies_and_adds_for_every_term() -> None:
    (mm,) = calls(graph_of(torch.mm, X, W), "mm")
    assert work.flops(mm) == 2 * 5 * 3 * 7
    assert work.traffic(mm) == 4 * (5 * 3 + 3 * 7 + 5 * 7)


def test_other_ops_count_their_traffic_alone() -> None:
    (add,) = calls(graph_of(torch.add, X, torch.ones(3)), "add")
    assert (work.flops(add), work.traffic(add)) == (0.0, 4 * (15 + 3 + 15))
    assert work.seconds(add, H100) > 0
    assert work.in_bytes(add) == pytest.approx(work.seconds(add, H100) * H100.link)


def test_a_view_costs_nothing() -> None:
    graph = graph_of(lambda x: x.t() + 1, X)
    view, add = (n for n in graph.nodes if n.op == "call_function")
    assert work.is_alias(view) and not work.is_alias(add)
    assert work.seconds(view, H100) == 0.0


def test_an_item_of_several_results_costs_nothing() -> None:
    graph = graph_of(lambda x: torch.max(x, 0)[1], X)
    items = [n for n in graph.nodes if n.target is operator.getitem]
    assert items and all(work.is_alias(n) for n in items)


def test_bytes_of_tensors_and_of_tuples_of_them() -> None:
    assert work.nbytes((X, None, W.half())) == 4 * 15 + 2 * 21
    assert work.nbytes(None) == 0
