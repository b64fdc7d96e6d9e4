"""The owners of memory, and their last readers."""

from __future__ import annotations

import torch

from shardfn.partition.lifetimes import ends_of, owners
from tests.support.stages.graphs import graph_of


def test_views_have_the_memory_of_their_base_until_the_last_of_them_is_read() -> (
    None
):
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
