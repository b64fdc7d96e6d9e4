"""Which values share memory, by the schemas of their ops."""

from __future__ import annotations

import torch

from shardfn.capture.views import memory_of, viewed
from tests.support.stages.graphs import graph_of

X = torch.ones(4, 6)


def nodes(fn) -> dict[str, torch.fx.Node]:
    return {node.name: node for node in graph_of(fn, X).nodes}


def test_a_view_has_the_memory_of_its_base_through_any_number_of_views() -> None:
    found = nodes(lambda x: x.t().unsqueeze(0)[0])
    assert viewed(found["t"]) is found["x_1"]
    assert viewed(found["unsqueeze"]) is found["t"]
    assert memory_of(found["select"]) is found["x_1"]


def test_a_computed_value_has_memory_of_its_own() -> None:
    found = nodes(lambda x: (x + 1).t())
    assert viewed(found["add"]) is None and viewed(found["x_1"]) is None
    assert memory_of(found["t"]) is found["add"]


def test_items_of_views_share_and_items_of_results_do_not() -> None:
    found = nodes(lambda x: x.split(2)[1] + x.max(0)[0])
    split = next(n for n in found.values() if n.args and str(n.args[0]) == "split")
    assert memory_of(split) is found["x_1"]
    item = next(n for n in found.values() if n.args and str(n.args[0]).startswith("max"))
    assert memory_of(item) == item.args, "the op, and which of its results"


def test_a_wait_returns_its_argument() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    wait = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (x,))
    assert viewed(wait) is x
