"""The loops of kernels."""

from __future__ import annotations

import torch

from shardfn.compile.kernels import spaces
from tests.support.stages.graphs import graph_of

aten = torch.ops.aten


def test_a_sum_over_the_last_dims_is_a_sum_of_rows() -> None:
    graph = graph_of(lambda x: [x.sum(1), x.sum(0)], torch.ones(3, 4))
    rows, columns = (x for x in graph.nodes if "sum" in str(x.target))
    assert spaces.reduced(rows) == (3, 12, True)
    assert spaces.reduced(columns) == (4, 12, False)


def test_a_group_norm_adds_over_the_channels_of_a_group() -> None:
    norm = lambda x: [aten.native_group_norm(x, None, None, 2, 6, 5, 3, 1e-5)[0]]
    graph = graph_of(norm, torch.ones(2, 6, 5))
    (node,) = (x for x in graph.nodes if "group_norm" in str(x.target))
    assert spaces.rows_of(node) == (6, 60, True)
