"""The owners of memory, and their last readers."""

from __future__ import annotations

import torch

from shardfn.partition.lifetimes import ends_of, owners
from tests.support.stages.graphs import graph_of


def test_views_have_the_memory_of_their_base_until_the_last_of_them_is_read() -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        a = x.exp()
        b = a.t()
        c = b.t().sin()
        return [c.cos()]

    graph = graph_of(fn, torch.ones(3, 4))
    nodes = {node.name: node for node in graph.nodes}
    owner = owners(graph)
    assert owner[nodes["t"]] is owner[nodes["t_1"]] is nodes["exp"]
    ends = ends_of(graph, owner)
    assert nodes["exp"] in ends[nodes["sin"]]
    assert nodes["cos"] in ends[nodes["output"]]


def test_each_tensor_of_a_tuple_may_have_memory_of_its_own() -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        values, places = x.sort()
        return [values.t(), places.sin()]

    graph = graph_of(fn, torch.ones(3, 4))
    first, second = (node for node in graph.nodes if node.name.startswith("getitem"))
    (source,) = first.all_input_nodes
    together = owners(graph)
    assert together[first] is together[second] is source
    apart = owners(graph, elements=True)
    assert apart[first] is first and apart[second] is second
    (view,) = first.users
    assert apart[view] is first
    ends = ends_of(graph, apart)
    (reader,) = second.users
    assert second in ends[reader] and first not in ends[reader]
